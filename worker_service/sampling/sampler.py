"""From logits to one token per row.

The order, part of the contract: grammar mask → float32 → greedy argmax or draw; drawing.py has the
draw's own order. A row's token depends on its own logits, parameters, seed and position only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from worker_service.domain.columns import IntColumn
from worker_service.domain.sampling import FloatColumn
from worker_service.sampling.drawing import draw
from worker_service.sampling.logit_stages import BoolColumn, UnfitRows, apply_masks
from worker_service.sampling.state import SamplingBatch

_Stage = Callable[[torch.Tensor, SamplingBatch, UnfitRows], None]

# What changes logits [S, vocabulary] in place before a token is chosen, in the contract's order. A
# stage touches only rows that ask for it, and returns at once when none does.
_LOGIT_STAGES: tuple[_Stage, ...] = (apply_masks,)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """`tokens` int32 [S], defined where neither flag is set. `invalid_logits`: the row's logits
    hold NaN or +inf, or nothing but -inf. `empty_mask`: its mask allows no token."""

    tokens: IntColumn
    invalid_logits: BoolColumn
    empty_mask: BoolColumn


def sample(logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
    """Samples logits [S, vocabulary] of any float dtype; rows that a stage changes are overwritten
    in place."""
    unfit = UnfitRows.none_of(logits.shape[0])
    for stage in _LOGIT_STAGES:
        stage(logits, batch, unfit)
    tokens, maxima = _highest(logits)
    unfit.invalid_logits |= ~np.isfinite(maxima)
    unfit.invalid_logits &= ~unfit.empty_mask
    drawn = (batch.parameters.temperature > 0) & ~unfit.invalid_logits & ~unfit.empty_mask
    indices = np.flatnonzero(drawn)
    if indices.size:
        tokens[indices] = draw(logits, maxima, batch, indices)
    return Sampled(tokens, unfit.invalid_logits, unfit.empty_mask)


def _highest(logits: torch.Tensor) -> tuple[IntColumn, FloatColumn]:
    """Each row's highest token int32 [S] and its logit [S]: the first of equals, NaN above all."""
    if logits.device.type == "cpu" and logits.dtype is torch.float32:
        # Takes an eighth of the time of torch's maximum, on one thread.
        host = logits.numpy()
        tokens = host.argmax(axis=1)
        return tokens.astype(np.int32), host[np.arange(tokens.size), tokens]
    maxima, argmax = logits.max(dim=-1)
    return argmax.cpu().numpy().astype(np.int32), maxima.float().cpu().numpy()
