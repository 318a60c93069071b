"""The slots that hold adapters for the compiled kernels, and which tokens of a step have which.

An adapter keeps the format that it came in, float32 or bfloat16: half the bytes are read, and
nothing is rounded. One more buffer than there are slots lets the next adapter be packed while steps
read all others.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from ctypes import POINTER, byref, c_int64, cast, pointer, sizeof
from dataclasses import dataclass

import numpy as np
import torch

from worker_service.domain.adapters import AdaptedPart, AdapterLimits
from worker_service.domain.batch import StepBatch
from worker_service.domain.columns import IntColumn
from worker_service.kernels.cpu import library
from worker_service.kernels.cpu.ops import CpuKernels, PackedWeight, address, linear_call
from worker_service.kernels.low_rank import LowRank

LayerParts = tuple[Sequence[AdaptedPart], ...]
"""What can be adapted of one layer's projections: qkv, output, gate and up, down."""

_FLOAT32, _BFLOAT16 = 0, 2
_ALIGNMENT = 64
# Longer runs of one adapter's tokens are cut, so that threads share them.
_RUN_TOKENS = 32


@dataclass(frozen=True, slots=True, eq=False)
class _Packed:
    """An adapter in a buffer: for each part of each layer where its matrices are."""

    buffer: torch.Tensor
    parts: Sequence[library.AdapterPart]


class StepAdapters:
    """The adapters of one step, as the kernels read them. Valid while this object lives."""

    def __init__(self, runs: tuple[IntColumn, IntColumn, IntColumn], stride: int) -> None:
        self._runs = runs
        starts, slots, tokens = runs
        self.batch = library.AdapterBatch(
            slots.size, starts.ctypes.data, slots.ctypes.data, tokens.ctypes.data, stride
        )


class CompiledAdapters:
    """Adapter slots in memory of their own; an executor reads them, and another one may follow it.

    Memory is taken when the first adapter comes. `prepare` may run on any thread, one at a time;
    everything else belongs to the device's thread.
    """

    def __init__(self, layers: Sequence[LayerParts], limits: AdapterLimits, width: int) -> None:
        """`width`: floats in a vector of the instruction set. Every layer has the same parts, but
        for the modules' names."""
        self._layers, self._limits, self._width = layers, limits, width
        self._per_layer = [part for parts in layers[0] for part in parts]
        self._slot_bytes = sum(sizes for sizes in self._sizes(limits.max_rank, 4))
        self._slots: list[_Packed | None] = [None] * limits.slot_count
        self._spare: torch.Tensor | None = None
        self._prepared: _Packed | None = None
        count = len(self._per_layer)
        self._targets = (library.AdapterTarget * count)(
            *(library.AdapterTarget(part.first, len(part.outputs)) for part in self._per_layer)
        )
        self._stride = len(layers) * count
        self._table = (library.AdapterPart * (limits.slot_count * self._stride))()

    @property
    def byte_count(self) -> int:
        """Memory of all slots, empty ones and the spare buffer included."""
        return (self._limits.slot_count + 1) * self._slot_bytes

    def prepare(self, modules: Mapping[str, LowRank]) -> None:
        """Packs an adapter, for the next `put`; what was packed before is dropped."""
        self._prepared = None
        buffer = self._spare if self._spare is not None else self._allocate()
        self._spare = buffer
        parts, at = [], 0
        for part in self._all_parts():
            pair = modules.get(part.module)
            if pair is None:
                parts.append(library.AdapterPart())
                continue
            kept = torch.bfloat16 if _are_bfloat16(pair) else torch.float32
            a = pair.a[:, part.inputs.start : part.inputs.stop].to(kept)
            b = pair.b[part.outputs.start : part.outputs.stop].to(kept)
            places = []
            for matrix in (a, b):
                panels = thin_panels(matrix, self._width)
                target = buffer[at : at + panels.nbytes].view(kept).view(panels.shape)
                places.append(target.copy_(panels).data_ptr())
                at += _aligned(panels.nbytes)
            kind = _BFLOAT16 if kept is torch.bfloat16 else _FLOAT32
            parts.append(library.AdapterPart(*places, pair.rank, kind, pair.scale))
        self._prepared = _Packed(buffer, parts)

    def put(self, slot: int) -> int:
        """Puts what was packed into a slot, from 1 on, that no row uses; returns its bytes."""
        assert self._prepared is not None
        before, packed = self._slots[slot - 1], self._prepared
        self._slots[slot - 1], self._prepared = packed, None
        self._spare = None if before is None else before.buffer
        self._write(slot, packed.parts)
        return self._slot_bytes

    def clear(self, slot: int) -> None:
        """Empties a slot that no row uses."""
        before, self._slots[slot - 1] = self._slots[slot - 1], None
        if before is not None and self._spare is None:
            self._spare = before.buffer
        self._write(slot, [library.AdapterPart()] * self._stride)

    def runs_of(self, batch: StepBatch) -> StepAdapters | None:
        """What the kernels need of a step; None where no sequence has an adapter."""
        if batch.adapter_slots is None:
            return None
        padded = -(-self._limits.max_rank // self._width) * self._width
        return StepAdapters(runs_of(batch.adapter_slots, batch.query_starts), padded)

    def describe(self, step: StepAdapters) -> library.Adapters:
        """The ABI's view of slots and step; valid while both live."""
        counts = np.cumsum([0, *(len(parts) for parts in self._layers[0])]).tolist()
        return library.Adapters(
            step.batch,
            cast(self._targets, POINTER(library.AdapterTarget)),
            (c_int64 * 5)(*counts),
            cast(self._table, POINTER(library.AdapterPart)),
            self._stride,
        )

    def apply(
        self,
        kernels: CpuKernels,
        step: StepAdapters,
        place: tuple[int, int],
        x: torch.Tensor,
        y: torch.Tensor,
        own: PackedWeight | None = None,
    ) -> None:
        """Adds to `y` [T, out] what the adapters make of `x` [T, in], for projection `place[1]` of
        layer `place[0]`. With `own`, the projection's weight, `y` is its product with `x` first, as
        a decoder does it within its one call."""
        layer, which = place
        counts = [len(parts) for parts in self._layers[0]]
        first = sum(counts[:which])
        at = (layer * len(self._per_layer) + first) * sizeof(library.AdapterPart)
        kernels.context.run(
            library.AdaptCall(
                own=None if own is None else pointer(linear_call(own, x, y)),
                batch=pointer(step.batch),
                targets=pointer(self._targets[first]),
                target_count=counts[which],
                parts=cast(byref(self._table, at), POINTER(library.AdapterPart)),
                part_stride=self._stride,
                x=address(x),
                x_stride=x.shape[1],
                k=x.shape[1],
                y=address(y),
                y_stride=y.shape[1],
            )
        )

    def _all_parts(self) -> Iterator[AdaptedPart]:
        for layer in self._layers:
            for parts in layer:
                yield from parts

    def _sizes(self, rank: int, item_bytes: int) -> Iterator[int]:
        for part in self._all_parts():
            for outputs, inputs in ((rank, len(part.inputs)), (len(part.outputs), rank)):
                panels = -(-outputs // self._width)
                yield _aligned(panels * self._width * inputs * item_bytes)

    def _allocate(self) -> torch.Tensor:
        memory = mmap.mmap(-1, self._slot_bytes)
        # Every adapter of a batch is read from end to end in each step: on small pages that misses
        # the address cache at each of them.
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # a kernel without them
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def _write(self, slot: int, parts: Sequence[library.AdapterPart]) -> None:
        start = (slot - 1) * self._stride
        for index, part in enumerate(parts):
            self._table[start + index] = part


def thin_panels(matrix: torch.Tensor, width: int) -> torch.Tensor:
    """matrix [n, k] → [ceil(n / width), k, width], outputs past n are 0."""
    rows, columns = matrix.shape
    panels = -(-rows // width)
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, panels * width - rows))
    return padded.view(panels, width, columns).transpose(1, 2)


def runs_of(slots: IntColumn, query_starts: IntColumn) -> tuple[IntColumn, IntColumn, IntColumn]:
    """Runs of tokens with one adapter each, from the sequences' slots int32 [R], 0: none.

    Returns where each run starts among the tokens [runs + 1], its slot counted from 0 [runs], and
    the tokens' indices, all int32.
    """
    lengths = query_starts[1:] - query_starts[:-1]
    of_tokens = np.repeat(slots, lengths)
    own_tokens = np.flatnonzero(of_tokens)
    tokens: IntColumn = own_tokens[np.argsort(of_tokens[own_tokens], kind="stable")].astype(
        np.int32
    )
    found, counts = np.unique(of_tokens[tokens], return_counts=True)
    starts, own = [0], []
    for slot, count in zip(found.tolist(), counts.tolist(), strict=True):
        end = starts[-1] + count
        while starts[-1] < end:
            starts.append(min(starts[-1] + _RUN_TOKENS, end))
            own.append(slot - 1)
    return np.array(starts, dtype=np.int32), np.array(own, dtype=np.int32), tokens


def _are_bfloat16(pair: LowRank) -> bool:
    return pair.a.dtype is pair.b.dtype is torch.bfloat16


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
