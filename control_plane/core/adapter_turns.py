"""Who gets which adapter slot. Pure: no clock, no I/O, nothing but the ledger changes.

Adapters take turns by the ranks of those that wait for them. An adapter gets a slot that is empty,
or else the one that nobody uses and that was used least recently. A slot is kept for those that may
begin with its adapter and rank first. Where every slot is in use and somebody has waited long, the
slot with the fewest users closes: nobody begins with its adapter any more, and once the last of its
users has ended it goes to whoever ranks first then. So an adapter that many ask for does not keep
the others out, and no slot changes hands for a moment's wait.
"""

from __future__ import annotations

from control_plane.core.adapters import AdapterLoad, AdapterSlots, Slot
from control_plane.core.events import FinishReason, SequenceOutput
from control_plane.core.ledger import Ledger
from control_plane.core.ranked_list import RankedList
from control_plane.core.sequence import Rank, Sequence
from control_plane.core.tokens import Tokens

PATIENCE_SECONDS = 1.0
"""How long somebody waits before a slot closes for him."""
_MOST_LOADS = 4
"""At once: a worker puts one after another in place."""
_BEFORE_ALL: Rank = (float("-inf"), 0.0, 0)


class AdapterTurns:
    """The adapters of one scheduler, as its caller deals with them. The books are the ledger's."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def take(self, now: float) -> None:
        """Gives slots to adapters that somebody waits for. To be called before each plan."""
        _take_turns(self._ledger, now)

    def take_loads(self) -> list[AdapterLoad]:
        """What the worker is to load now; each is to be answered once, in this claim.

        No step in flight uses these slots, and none will before the answer.
        """
        adapters = self._ledger.adapters
        loads, adapters.loads = adapters.loads, []
        return loads

    def loaded(self, load: AdapterLoad) -> None:
        """The worker has it: who waits for it may begin."""
        slot = self._answered(load)
        self._ledger.counters.adapter_loads += 1
        _release(self._ledger, slot.digest)

    def lost(self, load: AdapterLoad) -> None:
        """Nobody knows what is in the slot. Who waits for the adapter goes on waiting."""
        self._ledger.adapters.assign(self._answered(load), "")

    def refused(self, load: AdapterLoad, detail: str) -> list[SequenceOutput]:
        """The worker can't load it: who waits for it ends, with ADAPTER_UNAVAILABLE."""
        ledger = self._ledger
        self.lost(load)
        ledger.counters.adapter_failures += 1
        reason = FinishReason.ADAPTER_UNAVAILABLE
        return [
            SequenceOutput(each.sequence_id, Tokens([]), ledger.end(each, reason, detail=detail))
            for each in list(ledger.adapters.queues.get(load.digest, ()))
        ]

    def pin(self, digests: frozenset[str]) -> None:
        """These adapters, and no others, stay in their slots as long as there are other slots."""
        self._ledger.pinned = digests

    def _answered(self, load: AdapterLoad) -> Slot:
        slot = self._ledger.adapters.slots[load.slot - 1]
        assert slot.is_loading and slot.digest == load.digest, "answered twice"
        slot.is_loading = False
        return slot


def _take_turns(ledger: Ledger, now: float) -> None:
    slots = ledger.adapters
    loading = sum(slot.is_loading for slot in slots.slots)
    ready = _first_ready(ledger)
    turns = sorted(
        (_rank(ledger, first), digest, first)
        for digest, queue in slots.queues.items()
        if (first := _first(ledger, queue)) is not None
    )
    patient, is_cut = 0, False
    closing = [slot for slot in slots.slots if slot.is_closing]
    for rank, digest, first in turns:
        own = slots.slot_of(digest)
        if own is not None and own.is_loading:
            continue
        if own is not None:
            if not patient:  # nobody before it needs a slot
                _open(ledger, own)
                closing.remove(own)
                ready[digest] = first
            continue
        if loading >= _MOST_LOADS:
            is_cut = True
            break
        slot = _unused(ledger, rank, ready)
        if slot is not None:
            if slot in closing:
                closing.remove(slot)
            _load(ledger, slot, first, ready)
            loading += 1
        elif rank == _BEFORE_ALL or now - first.request.arrival >= PATIENCE_SECONDS:
            patient += 1
            if len(closing) < patient and (slot := _to_close(ledger, rank, ready)) is not None:
                ready.pop(slot.digest, None)
                _close(ledger, slot)
                closing.append(slot)
        else:
            break
    for slot in [] if is_cut else closing[patient:]:
        _open(ledger, slot)


def _load(ledger: Ledger, slot: Slot, first: Sequence, ready: dict[str, Sequence]) -> None:
    """The slot goes to this sequence's adapter. Who waited with that of before waits for one."""
    if slot.digest:
        ready.pop(slot.digest, None)
        _close(ledger, slot)
    adapter = first.request.adapter
    assert adapter is not None
    ledger.counters.adapter_evictions += ledger.adapters.load(slot, adapter.digest, adapter.name)


def _unused(ledger: Ledger, rank: Rank, ready: dict[str, Sequence]) -> Slot | None:
    """The slot that somebody of this rank gets at once: an empty one before all others."""
    slots, answered = ledger.adapters, ledger.answered_step_id
    found = [
        slot for slot in _open_to(ledger, slots, rank, ready) if slots.is_unused(slot, answered)
    ]
    return min(
        found,
        key=lambda slot: (bool(slot.digest), slot.digest in ready, slot.last_use, slot.number),
        default=None,
    )


def _to_close(ledger: Ledger, rank: Rank, ready: dict[str, Sequence]) -> Slot | None:
    """The slot that should be free soonest for somebody of this rank."""
    found = [
        slot
        for slot in _open_to(ledger, ledger.adapters, rank, ready)
        if not (slot.is_closing or slot.is_loading)
    ]
    return min(found, key=lambda slot: (slot.user_count, slot.last_use, slot.number), default=None)


def _open_to(
    ledger: Ledger, slots: AdapterSlots, rank: Rank, ready: dict[str, Sequence]
) -> list[Slot]:
    """Slots whose adapters nobody waits to begin with who ranks before, and none that is pinned,
    unless all are."""
    loose = [slot for slot in slots.slots if slot.digest not in ledger.pinned] or slots.slots
    return [
        slot
        for slot in loose
        if slot.digest not in ready or rank < _rank(ledger, ready[slot.digest])
    ]


def _first_ready(ledger: Ledger) -> dict[str, Sequence]:
    """The first that waits for a row with each adapter."""
    found: dict[str, Sequence] = {}
    for sequence in ledger.waiting:
        if sequence.request.adapter is not None and (
            sequence.completion_count or not ledger.is_closing
        ):
            found.setdefault(sequence.adapter_digest, sequence)
    return found


def _first(ledger: Ledger, queue: RankedList) -> Sequence | None:
    if ledger.suspects:
        for sequence in queue:
            if sequence.sequence_id in ledger.suspects:
                return sequence
    return queue.first_begun if ledger.is_closing else queue.first


def _rank(ledger: Ledger, sequence: Sequence) -> Rank:
    """Whoever is on trial comes before all: nobody else runs meanwhile."""
    return _BEFORE_ALL if sequence.sequence_id in ledger.suspects else sequence.rank


def _close(ledger: Ledger, slot: Slot) -> None:
    slot.is_closing = True
    _hold_back(ledger, slot.digest)


def _open(ledger: Ledger, slot: Slot) -> None:
    slot.is_closing = False
    _release(ledger, slot.digest)


def _hold_back(ledger: Ledger, digest: str) -> None:
    """Who waits for a row with this adapter waits for a slot instead."""
    for sequence in [one for one in ledger.waiting if one.adapter_digest == digest]:
        ledger.adapters.unlist(sequence)
        ledger.adapters.enlist(sequence)


def _release(ledger: Ledger, digest: str) -> None:
    for sequence in ledger.adapters.dismiss(digest):
        ledger.adapters.enlist(sequence)
