"""The KV pool: memory for the keys and values of every layer, sized by a budget in bytes."""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from worker_service.attention.interface import LayerAttention
from worker_service.domain.capability import DataType, LayerGroup
from worker_service.domain.columns import NULL_BLOCK
from worker_service.domain.plan import StepPlan
from worker_service.load_errors import KVPoolTooLarge, MemoryBudgetTooSmall
from worker_service.model.share import DecoderShare
from worker_service.model.spec import DecoderSpec

# Plans name blocks by int32.
_MAX_BLOCK_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class LayerMemory:
    """One layer's memory: `keys`, `values` [blocks, block_size · kv_head_count · head_dim].

    The executor decides in which order a block holds its numbers.
    """

    keys: torch.Tensor
    values: torch.Tensor
    kv_head_count: int
    head_dim: int


class KVCache:
    """The memory of all blocks. A block has a part in every layer; `layers` has one per layer, in
    order.

    Memory is not written before a step needs it, so that the host does not have to back it earlier.
    The content of a block that a sequence takes is therefore unspecified. An executor that reads
    slots before they are written calls `clear_taken` first.
    """

    def __init__(
        self,
        layer_groups: tuple[LayerGroup, ...],
        block_count: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        """Raises KVPoolTooLarge where the host refuses the memory."""
        self.block_count = block_count
        self.block_size = block_size
        self.bytes_per_block = bytes_per_block(layer_groups, block_size)
        self.layer_groups = layer_groups
        self._tensors: list[torch.Tensor] = []
        self._maps: list[mmap.mmap] = []
        self.is_held = True
        """Whether it has its memory; see `free`."""
        layers = dict(
            pair for group in layer_groups for pair in self._allocate_group(group, device)
        )
        self.layers = tuple(layers[index] for index in sorted(layers))
        self.clear_null_block()

    @property
    def byte_count(self) -> int:
        return self.block_count * self.bytes_per_block

    @property
    def held_bytes(self) -> int:
        """What it takes of the device now."""
        return self.byte_count if self.is_held else 0

    def free(self) -> None:
        """Gives the memory back, and with it what was in it. The tensors stay, and must not be
        used until `take`. Idempotent."""
        if not self.is_held:
            return
        self.is_held = False
        for memory in self._maps:  # the addresses stay ours, and the pages go
            memory.madvise(mmap.MADV_REMOVE)
        if not self._maps:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(0)

    def take(self) -> None:
        """Takes the memory again. Raises KVPoolTooLarge with nothing taken. Idempotent."""
        if self.is_held:
            return
        if not self._maps:
            self._take_from_device()
        self.is_held = True
        self.clear_null_block()

    def _take_from_device(self) -> None:
        try:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.numel() * tensor.itemsize)
        except torch.OutOfMemoryError as error:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(0)
            raise KVPoolTooLarge(
                f"{tensor.device} does not give the KV pool's {self.byte_count} bytes again"
            ) from error

    def clear_taken(self, plan: StepPlan) -> None:
        """Zeroes the blocks that the plan gives to sequences and that hold no KV of theirs."""
        taken = [plan.scheduled.appended_blocks]
        for sequence in plan.added:
            kept = -(-sequence.computed_token_count // self.block_size)
            taken.append(sequence.block_ids[kept:])
        self._clear(np.concatenate(taken).tolist())

    def clear_null_block(self) -> None:
        """Zeroes the block that pads block tables, after a run that wrote into it."""
        self._clear([NULL_BLOCK])

    def _clear(self, blocks: Iterable[int]) -> None:
        device = self._tensors[0].device
        indices = torch.tensor(list(blocks), dtype=torch.int64, device=device)
        if indices.numel():
            for tensor in self._tensors:
                tensor.index_fill_(1, indices, 0)

    def _allocate_group(
        self, group: LayerGroup, device: torch.device
    ) -> Iterator[tuple[int, LayerMemory]]:
        """The memory of each of the group's layers, by the layer's index."""
        block = self.block_size * group.kv_head_count * group.head_dim
        shape = (len(group.layer_indices), self.block_count, block)
        dtype = getattr(torch, group.data_type.value)
        keys, values = (self._allocate(shape, dtype, device) for _ in range(2))
        self._tensors += [keys, values]
        for place, index in enumerate(group.layer_indices):
            yield (
                index,
                LayerMemory(keys[place], values[place], group.kv_head_count, group.head_dim),
            )

    def _allocate(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Allocates device memory, its contents unspecified; on a host with huge pages, in those.

        A sequence's blocks lie anywhere in the pool, so on small pages reading each one misses the
        processor's address cache.
        """
        size = math.prod(shape) * dtype.itemsize
        if device.type != "cpu":
            try:
                return torch.empty(shape, dtype=dtype, device=device)
            except torch.OutOfMemoryError as error:
                raise KVPoolTooLarge(
                    f"{device} does not give {size} of the KV pool's {self.byte_count} bytes: "
                    "give less by --kv-cache-memory-bytes"
                ) from error
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, OverflowError) as error:
            raise KVPoolTooLarge(
                f"this machine does not give {size} of the KV pool's {self.byte_count} bytes "
                f"({error}): give less by --kv-cache-memory-bytes"
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(
                OSError
            ):  # a system without huge pages refuses; it works without
                memory.madvise(mmap.MADV_HUGEPAGE)
        self._maps.append(memory)
        return torch.frombuffer(memory, dtype=dtype).view(shape)


def layer_groups(spec: DecoderSpec | DecoderShare, data_type: DataType) -> tuple[LayerGroup, ...]:
    """Layers whose KV is alike, in order of first appearance; of a share, only its own layers,
    under their indices in the whole."""
    groups: dict[tuple[int, int, int | None], LayerGroup] = {}
    first = spec.first_layer if isinstance(spec, DecoderShare) else 0
    for index, layer in enumerate(spec.layers, first):
        heads = layer.attention.heads
        key = (heads.kv_head_count, heads.head_dim, heads.window)
        group = groups.get(key)
        if group is None:
            groups[key] = _group_of(heads, index, data_type)
        else:
            groups[key] = replace(group, layer_indices=(*group.layer_indices, index))
    return tuple(groups.values())


def bytes_per_block(groups: Iterable[LayerGroup], block_size: int) -> int:
    """Bytes of one block over all layers, keys and values."""
    return sum(
        2
        * len(group.layer_indices)
        * block_size
        * group.kv_head_count
        * group.head_dim
        * int(getattr(torch, group.data_type.value).itemsize)
        for group in groups
    )


def blocks_within(budget_bytes: int, groups: Iterable[LayerGroup], block_size: int) -> int:
    """How many blocks the budget holds, the null block included.

    Raises MemoryBudgetTooSmall when not even one sequence of one block fits.
    """
    size = bytes_per_block(groups, block_size)
    count = min(budget_bytes // size, _MAX_BLOCK_COUNT)
    if count < 2:
        raise MemoryBudgetTooSmall(
            f"a KV pool of {budget_bytes} bytes holds no sequence: give at least {2 * size}, "
            f"two blocks of {size} bytes, by --kv-cache-memory-bytes, or smaller blocks by "
            "--block-size"
        )
    return count


def _group_of(heads: LayerAttention, index: int, data_type: DataType) -> LayerGroup:
    return LayerGroup(
        layer_indices=(index,),
        kv_head_count=heads.kv_head_count,
        head_dim=heads.head_dim,
        data_type=data_type,
        window_token_count=heads.window,
    )
