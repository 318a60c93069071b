"""The adapter slots of one worker: what each holds, who uses it, and who waits for one.

A sequence whose adapter is in a slot waits for a row like everybody else. One whose adapter is not
waits here, and blocks nobody: the planner does not see it. adapter_turns.py decides who gets which
slot; here are only the books.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from control_plane.core.ranked_list import RankedList
from control_plane.core.sequence import Sequence


@dataclass(slots=True, eq=False)
class Slot:
    """A place for one adapter on the worker, by its number from 1 on."""

    number: int
    digest: str = ""
    """Of what it holds, or is about to; empty: nothing that is known."""
    is_loading: bool = False
    is_closing: bool = False
    """Nobody begins with its adapter any more: others have waited long for a slot."""
    user_count: int = 0
    """Running sequences."""
    removal_step: int = 0
    """The step that removes the last row that used it from the worker."""
    last_use: int = 0
    """Larger where somebody began with it later."""


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The worker shall load an adapter into a slot, in place of what is there."""

    slot: int
    digest: str
    name: str


class AdapterSlots:
    """The slots of one claim, and the sequences that wait for one. `waiting` has those that wait
    for a row."""

    def __init__(self, count: int, waiting: RankedList, held: Mapping[int, str]) -> None:
        self._waiting = waiting
        self.slots = [Slot(number) for number in range(1, count + 1)]
        self.queues: dict[str, RankedList] = {}
        """Who waits for an adapter, by its digest. None is empty."""
        self.missing_token_count = 0
        """Of all that wait here, as each was when it came."""
        self.loads: list[AdapterLoad] = []
        """What the worker shall load, and was not told yet."""
        self._slot_of: dict[str, Slot] = {}
        self._use_count = 0
        for number, digest in held.items():
            if 1 <= number <= count and digest and digest not in self._slot_of:
                self.assign(self.slots[number - 1], digest)

    def __len__(self) -> int:
        """Who waits here."""
        return sum(map(len, self.queues.values()))

    def slot_of(self, digest: str) -> Slot | None:
        """Where an adapter is, or is about to be."""
        return self._slot_of.get(digest)

    def is_ready(self, digest: str) -> bool:
        """Whether a sequence with this adapter may begin."""
        slot = self._slot_of.get(digest)
        return slot is not None and not (slot.is_loading or slot.is_closing)

    def is_unused(self, slot: Slot, answered_step_id: int) -> bool:
        """Whether the worker has no row that uses the slot, as far as its answers say."""
        return not (slot.user_count or slot.is_loading) and slot.removal_step <= answered_step_id

    def could_take(self, digest: str, answered_step_id: int) -> bool:
        """Whether a sequence with this adapter would wait for a load at most."""
        slot = self._slot_of.get(digest)
        if slot is not None:
            return not slot.is_closing
        return not self.queues and any(
            self.is_unused(slot, answered_step_id) for slot in self.slots
        )

    # --- who uses slots, and who waits --------------------------------------------------------

    def use(self, digest: str) -> int:
        """A sequence begins with an adapter that is ready. Returns the slot."""
        slot = self._slot_of[digest]
        assert not slot.is_loading and not slot.is_closing
        self._use_count += 1
        slot.user_count += 1
        slot.last_use = self._use_count
        return slot.number

    def release(self, number: int, removal_step: int) -> None:
        """A sequence has left its row, which this step removes from the worker."""
        slot = self.slots[number - 1]
        slot.user_count -= 1
        slot.removal_step = removal_step

    def enlist(self, sequence: Sequence) -> None:
        """A sequence waits: for a row or, where its adapter has no slot, for that."""
        adapter = sequence.request.adapter
        if adapter is None or self.is_ready(adapter.digest):
            self._waiting.add(sequence)
            return
        sequence.awaits_adapter = True
        self.queues.setdefault(sequence.adapter_digest, RankedList()).add(sequence)
        self.missing_token_count += sequence.missing

    def unlist(self, sequence: Sequence) -> None:
        """It does not wait any more."""
        if not sequence.awaits_adapter:
            self._waiting.remove(sequence)
            return
        digest = sequence.adapter_digest
        queue = self.queues[digest]
        queue.remove(sequence)
        if not queue:
            del self.queues[digest]
        sequence.awaits_adapter = False
        self.missing_token_count -= sequence.missing

    def awaiting(self) -> Iterator[Sequence]:
        """All that wait here, those with the same adapter one after another."""
        for queue in self.queues.values():
            yield from queue

    def dismiss(self, digest: str | None = None) -> list[Sequence]:
        """All that wait here, or for this adapter, which do so no more."""
        found = list(self.awaiting() if digest is None else self.queues.get(digest, ()))
        for sequence in found:
            self.unlist(sequence)
        return found

    # --- what slots hold ----------------------------------------------------------------------

    def assign(self, slot: Slot, digest: str) -> bool:
        """The slot holds this adapter from now on. Returns whether it held another."""
        evicts = bool(slot.digest)
        if evicts:
            del self._slot_of[slot.digest]
        slot.digest, slot.is_closing = digest, False
        if digest:
            self._slot_of[digest] = slot
        return evicts

    def load(self, slot: Slot, digest: str, name: str) -> bool:
        """An adapter is to be loaded into an unused slot. Returns whether that evicts another."""
        evicts = self.assign(slot, digest)
        slot.is_loading = True
        self._use_count += 1
        slot.last_use = self._use_count
        self.loads.append(AdapterLoad(slot.number, digest, name))
        return evicts

    def check(self, running: list[Sequence]) -> None:
        """Raises AssertionError where these books do not balance."""
        digests = [slot.digest for slot in self.slots if slot.digest]
        assert sorted(digests) == sorted(self._slot_of), "an adapter is in two slots, or in none"
        users = [sequence.adapter_slot for sequence in running if sequence.adapter_slot]
        for slot in self.slots:
            assert slot.user_count == users.count(slot.number), f"users of slot {slot.number}"
            assert not (slot.is_loading and slot.user_count), "a slot is used while it is loaded"
            assert not slot.is_loading or slot.digest, "nothing is loaded"
        for sequence in running:
            number = sequence.adapter_slot
            digest = self.slots[number - 1].digest if number else ""
            assert digest == sequence.adapter_digest, "a row's slot holds another adapter"
        for digest, queue in self.queues.items():
            assert queue and not self.is_ready(digest), f"{digest}: waits, and need not"
            assert all(each.adapter_digest == digest for each in queue)
            assert all(each.awaits_adapter for each in queue)
        missing = sum(sequence.missing for sequence in self.awaiting())
        assert missing == self.missing_token_count, "what adapters' waiters miss is miscounted"
