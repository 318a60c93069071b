"""Adapters in torch: their slots, and what they add to a projection, for any device and dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from worker_service.domain.adapters import AdaptedPart, AdapterLimits
from worker_service.domain.batch import StepBatch
from worker_service.kernels.low_rank import LowRank
from worker_service.layers.linear import Linear


@dataclass(frozen=True, slots=True, eq=False)
class _Added:
    """What is added to the outputs from `first` on: `b` (`a` x), the scale being in neither."""

    first: int
    a: torch.Tensor
    b: torch.Tensor
    scale: float


_Held = Mapping[AdaptedPart, _Added]


class TorchAdapters:
    """Adapter slots on a device. One more buffer than there are slots takes the next adapter.

    Memory is taken when the first adapter comes. `prepare` may run on any thread, one at a time;
    everything else belongs to the device's thread.
    """

    def __init__(
        self,
        parts: Sequence[AdaptedPart],
        limits: AdapterLimits,
        data_type: torch.dtype,
        device: torch.device,
    ) -> None:
        """`parts`: everything that can be adapted on this rank."""
        self._parts, self._limits = parts, limits
        self._data_type, self._device = data_type, device
        numbers = sum(limits.max_rank * (len(each.inputs) + len(each.outputs)) for each in parts)
        self._slot_numbers = numbers
        self._slots: list[tuple[torch.Tensor, _Held] | None] = [None] * limits.slot_count
        self._spare: torch.Tensor | None = None
        self._prepared: tuple[torch.Tensor, _Held] | None = None
        self._groups: list[tuple[torch.Tensor, _Held]] = []

    @property
    def byte_count(self) -> int:
        """Memory of all slots, empty ones and the spare buffer included."""
        return (self._limits.slot_count + 1) * self._slot_bytes

    @torch.inference_mode()
    def prepare(self, modules: Mapping[str, LowRank]) -> None:
        """Brings an adapter to the device, for the next `put`; one before it is dropped."""
        self._prepared = None
        buffer = self._spare
        if buffer is None:
            buffer = torch.empty(self._slot_numbers, dtype=self._data_type, device=self._device)
            self._spare = buffer
        held, at = {}, 0
        for part in self._parts:
            pair = modules.get(part.module)
            if pair is None:
                continue
            own = []
            for matrix in (
                pair.a[:, part.inputs.start : part.inputs.stop],
                pair.b[part.outputs.start : part.outputs.stop],
            ):
                own.append(buffer[at : at + matrix.numel()].view(matrix.shape).copy_(matrix))
                at += matrix.numel()
            held[part] = _Added(part.first, own[0], own[1], pair.scale)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._prepared = (buffer, held)

    def put(self, slot: int) -> int:
        """Puts what was prepared into a slot, from 1 on, that no row uses; returns its bytes."""
        assert self._prepared is not None
        before, self._slots[slot - 1] = self._slots[slot - 1], self._prepared
        self._prepared = None
        self._spare = None if before is None else before[0]
        return self._slot_bytes

    def clear(self, slot: int) -> None:
        """Empties a slot that no row uses."""
        before, self._slots[slot - 1] = self._slots[slot - 1], None
        if before is not None and self._spare is None:
            self._spare = before[0]

    def select(self, batch: StepBatch) -> None:
        """Says which tokens of the next step have which adapter."""
        self._groups = []
        if batch.adapter_slots is None:
            return
        of_tokens = np.repeat(batch.adapter_slots, batch.query_lengths)
        for slot in np.unique(of_tokens[of_tokens > 0]).tolist():
            held = self._slots[slot - 1]
            assert held is not None
            tokens = torch.from_numpy(np.flatnonzero(of_tokens == slot)).to(self._device)
            self._groups.append((tokens, held[1]))

    def add(self, parts: Sequence[AdaptedPart], x: torch.Tensor, y: torch.Tensor) -> None:
        """Adds to `y` [T, out] what each token's adapter makes of `x` [T, in], in place."""
        for tokens, held in self._groups:
            added = [held[part] for part in parts if part in held]
            if not added:
                continue
            own = x.index_select(0, tokens)
            for each in added:
                term = (own @ each.a.mT) @ each.b.mT
                end = each.first + each.b.shape[0]
                y[:, each.first : end].index_add_(0, tokens, term, alpha=each.scale)

    @property
    def _slot_bytes(self) -> int:
        return self._slot_numbers * self._data_type.itemsize


class AdaptedLinear:
    """A projection to which adapters add."""

    def __init__(self, own: Linear, parts: Sequence[AdaptedPart], adapters: TorchAdapters) -> None:
        self._own = own
        self._parts = parts
        self._adapters = adapters

    @property
    def byte_count(self) -> int:
        return self._own.byte_count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] → [rows, out], a new tensor. The rows are a step's tokens."""
        y = self._own(x)
        self._adapters.add(self._parts, x, y)
        return y
