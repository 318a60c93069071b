"""Attention as one would write it on a board: row by row, in float32.

For tests, and for where nothing else runs.
"""

from __future__ import annotations

import numpy as np
import torch

from worker_service.attention.interface import AttentionConfig, BackendType, LayerCache
from worker_service.domain.batch import StepBatch


class ReferenceBackend:
    """Gathers each row's whole context and takes an explicit softmax."""

    def __init__(self, config: AttentionConfig, caches: tuple[LayerCache, ...]) -> None:
        self._config = config
        self._caches = caches

    @property
    def workspace_bytes(self) -> int:
        return 0

    def plan(self, batch: StepBatch) -> ReferenceStep:
        return ReferenceStep(self._config, self._caches, batch)


class ReferenceStep:
    """See StepAttention."""

    def __init__(
        self, config: AttentionConfig, caches: tuple[LayerCache, ...], batch: StepBatch
    ) -> None:
        self._config = config
        self._caches = caches
        self._batch = batch

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        cache, block_size = self._caches[layer], self._config.block_size
        for token, slot in enumerate(self._batch.slots.tolist()):
            cache.keys[slot // block_size, slot % block_size] = keys[token]
            cache.values[slot // block_size, slot % block_size] = values[token]

    def forward(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(queries)
        for row in range(self._batch.query_lengths.size):
            tokens = slice(
                int(self._batch.query_starts[row]), int(self._batch.query_starts[row + 1])
            )
            out[tokens] = self._attend(layer, row, queries[tokens]).to(out.dtype)
        return out

    def _attend(self, layer: int, row: int, queries: torch.Tensor) -> torch.Tensor:
        heads, cache = self._config.layers[layer], self._caches[layer]
        device = self._config.device
        length = int(self._batch.context_lengths[row])
        blocks = torch.from_numpy(self._batch.block_tables[row].astype(np.int64)).to(device)
        groups = heads.head_count // heads.kv_head_count
        keys = cache.keys[blocks].flatten(0, 1)[:length].float().repeat_interleave(groups, dim=1)
        values = (
            cache.values[blocks].flatten(0, 1)[:length].float().repeat_interleave(groups, dim=1)
        )
        scores = torch.einsum("qhd,khd->hqk", queries.float(), keys) * heads.scale
        query_positions = torch.arange(length - queries.shape[0], length).unsqueeze(1)
        key_positions = torch.arange(length).unsqueeze(0)
        visible = key_positions <= query_positions
        if heads.window is not None:
            visible &= key_positions > query_positions - heads.window
        scores = scores.masked_fill(~visible.to(device), float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values)


def _probe(config: AttentionConfig) -> str | None:
    del config  # runs anywhere torch does
    return None


REFERENCE = BackendType("reference", _probe, ReferenceBackend, lambda config: 0)
