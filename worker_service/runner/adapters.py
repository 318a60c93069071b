"""The adapters of a runner: what each slot holds, and how an adapter gets into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from worker_service.domain.adapters import Adapter, AdapterLimits, LoadedAdapter
from worker_service.domain.errors import AdapterInUse, PlanMismatch
from worker_service.domain.plan import AddedSequence

Modules = Mapping[str, tuple[int, int]]
"""Outputs and inputs of each projection that can be adapted, by its name in the model."""


class SlotMemory(Protocol):
    """Where adapters' numbers are. `prepare` may run on any thread, one at a time."""

    @property
    def byte_count(self) -> int:
        """Memory of all slots, empty ones included, and of one more adapter."""
        ...

    def prepare(self, adapter: Adapter) -> None:
        """Makes of an adapter what the device reads, for the next `put`."""
        ...

    def put(self, slot: int) -> int:
        """Puts what was prepared into a slot, counted from 1; returns the bytes that it takes."""
        ...

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        ...


class NoMemory:
    """SlotMemory of a simulated device."""

    byte_count = 0

    def prepare(self, adapter: Adapter) -> None:
        """Does nothing."""

    def put(self, slot: int) -> int:
        return 0

    def clear(self, slot: int) -> None:
        """Does nothing."""


class AdapterSlots:
    """What the slots hold. `modules` None: a model that takes any adapter that fits together.

    Belongs to the device's thread, but for `limits`, `modules` and `prepare`.
    """

    def __init__(
        self,
        limits: AdapterLimits,
        modules: Modules | None = None,
        memory: SlotMemory | None = None,
    ) -> None:
        self.limits = limits
        self.modules = modules
        self._memory = NoMemory() if memory is None else memory
        self._held: dict[int, LoadedAdapter] = {}
        self.uses: Callable[[int], int] = lambda slot: 0
        """How many rows use a slot; whoever keeps the rows sets it."""

    @property
    def byte_count(self) -> int:
        """Memory on the device, empty slots included."""
        return self._memory.byte_count

    def digest(self, slot: int) -> str | None:
        """That of the adapter in a slot; None where there is none."""
        held = self._held.get(slot)
        return None if held is None else held.adapter.digest

    def held(self) -> tuple[LoadedAdapter, ...]:
        """What the slots hold, by slot."""
        return tuple(self._held[slot] for slot in sorted(self._held))

    def check(self, sequence: AddedSequence) -> None:
        """Raises PlanMismatch where the sequence's slot does not hold its adapter."""
        slot = sequence.adapter_slot
        if not slot:
            return
        held = self.digest(slot)
        if held is None or held != sequence.adapter_digest:
            found = "nothing" if held is None else held[:12]
            raise PlanMismatch(
                f"slot {slot} holds {found}, the plan is for {sequence.adapter_digest[:12]!r}",
                (sequence.row,),
            )

    def require_unused(self, slot: int) -> None:
        """Raises AdapterInUse where rows use the slot."""
        if count := self.uses(slot):
            rows = "a row uses" if count == 1 else f"{count} rows use"
            raise AdapterInUse(f"{rows} slot {slot}")

    def prepare(self, adapter: Adapter) -> None:
        """Makes of an adapter what the device reads, for the next `put`. Any thread, one at a
        time."""
        self._memory.prepare(adapter)

    def put(self, slot: int, adapter: Adapter) -> LoadedAdapter:
        """Puts the adapter, which was prepared last, into a slot, counted from 1, in place of what
        was there. Raises AdapterInUse."""
        self.require_unused(slot)
        size = self._memory.put(slot)
        self._held[slot] = LoadedAdapter(slot, adapter.description, size)
        return self._held[slot]

    def clear(self, slot: int) -> None:
        """Empties a slot, which may be empty. Raises AdapterInUse."""
        self.require_unused(slot)
        if self._held.pop(slot, None) is not None:
            self._memory.clear(slot)
