"""The KV pool: every layer's blocks in one allocation, sized by a budget in bytes."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from worker_service.attention.interface import LayerCache
from worker_service.domain.capability import DataType, LayerGroup
from worker_service.domain.columns import NULL_BLOCK
from worker_service.domain.plan import StepPlan
from worker_service.load_errors import KVPoolTooLarge, MemoryBudgetTooSmall
from worker_service.model.config import ModelConfig


class KVCache:
    """Blocks of keys and values, [layers, blocks, block_size, kv_heads, head_dim] each; a forward
    pass may order what is within a block as it likes.

    Raises KVPoolTooLarge where the host refuses the memory.

    Blocks are zeroed when a sequence takes them, so no row ever meets what another left behind, not
    even as a masked NaN. Until then the host's memory is not touched.
    """

    def __init__(
        self,
        config: ModelConfig,
        block_count: int,
        block_size: int,
        data_type: DataType,
        device: torch.device,
    ) -> None:
        self.block_count = block_count
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block(config, block_size, data_type)
        self.layer_groups = _layer_groups(config, data_type)
        shape = (config.layer_count, block_count, block_size, config.kv_head_count, config.head_dim)
        dtype = getattr(torch, data_type.value)
        self._keys = _allocate(shape, dtype, device)
        self._values = _allocate(shape, dtype, device)
        self.layers = tuple(
            LayerCache(keys, values) for keys, values in zip(self._keys, self._values, strict=True)
        )
        self.clear_null_block()

    @property
    def byte_count(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def clear_taken(self, plan: StepPlan) -> None:
        """Zeroes the blocks that the plan hands to sequences without KV of theirs in them."""
        taken = [plan.scheduled.appended_blocks]
        for sequence in plan.added:
            kept = -(-sequence.computed_token_count // self.block_size)
            taken.append(sequence.block_ids[kept:])
        self._clear(np.concatenate(taken).tolist())

    def clear_null_block(self) -> None:
        """Zeroes the block that pads block tables, after a run that wrote into it."""
        self._clear([NULL_BLOCK])

    def _clear(self, blocks: Iterable[int]) -> None:
        indices = torch.tensor(list(blocks), dtype=torch.int64, device=self._keys.device)
        if indices.numel():
            self._keys.index_fill_(1, indices, 0)
            self._values.index_fill_(1, indices, 0)


def _allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory of the device, its contents unspecified; on the host in huge pages where it has them.

    A sequence's blocks lie anywhere in the pool, so on small pages reading each one misses the
    processor's address cache.
    """
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, size)
    except (OSError, OverflowError) as error:
        raise KVPoolTooLarge(
            f"this machine has no {size} bytes for half of the KV pool ({error}): "
            "give less by --kv-cache-memory-bytes"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them refuses: small ones serve
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def bytes_per_block(config: ModelConfig, block_size: int, data_type: DataType) -> int:
    """Bytes of one block over all layers, keys and values."""
    numbers = config.layer_count * block_size * config.kv_head_count * config.head_dim
    return 2 * numbers * int(getattr(torch, data_type.value).itemsize)


def blocks_within(budget_bytes: int, config: ModelConfig, block_size: int, dtype: DataType) -> int:
    """How many blocks the budget holds, the null block included.

    Raises MemoryBudgetTooSmall when not even one sequence of one block fits.
    """
    size = bytes_per_block(config, block_size, dtype)
    count = budget_bytes // size
    if count < 2:
        raise MemoryBudgetTooSmall(
            f"a KV pool of {budget_bytes} bytes holds no sequence: give at least {2 * size}, "
            f"two blocks of {size} bytes"
        )
    return count


def _layer_groups(config: ModelConfig, data_type: DataType) -> tuple[LayerGroup, ...]:
    """Layers by window, in order of first appearance."""
    return tuple(
        LayerGroup(
            layer_indices=tuple(
                layer for layer, own in enumerate(config.layer_windows) if own == window
            ),
            kv_head_count=config.kv_head_count,
            head_dim=config.head_dim,
            data_type=data_type,
            window_token_count=window,
        )
        for window in dict.fromkeys(config.layer_windows)
    )
