"""What changes logits before a token is chosen. sampler.py says in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from worker_service.sampling.state import SamplingBatch

BoolColumn = npt.NDArray[np.bool_]


@dataclass(slots=True, eq=False)
class UnfitRows:
    """Rows that can get no token, as the stages find them: bool [S] each."""

    invalid_logits: BoolColumn
    empty_mask: BoolColumn

    @classmethod
    def none_of(cls, row_count: int) -> UnfitRows:
        return cls(np.zeros(row_count, dtype=bool), np.zeros(row_count, dtype=bool))


def apply_masks(logits: torch.Tensor, batch: SamplingBatch, unfit: UnfitRows) -> None:
    """Grammar masks: what a row's mask forbids becomes -inf. NaN is invalid, masked or not."""
    masks = batch.masks
    if masks is None or not masks.indices.size:
        return
    allowed = masks.allowed(logits.shape[1])
    indices = torch.from_numpy(masks.indices).to(logits.device)
    rows = logits.index_select(0, indices)
    unfit.invalid_logits[masks.indices] = rows.amax(dim=-1).isnan().cpu().numpy()
    unfit.empty_mask[masks.indices] = ~allowed.any(axis=1)
    forbidden = torch.from_numpy(~allowed).to(logits.device)
    logits.index_copy_(0, indices, rows.masked_fill_(forbidden, float("-inf")))
