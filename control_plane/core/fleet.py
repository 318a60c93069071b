"""Where sequences should be, over all replicas. Pure: it looks at cores, and changes none.

Every sequence is in one core, waiting or running. It is placed once, and moves only for a reason:
its worker is lost or leaves, or it waits where another replica would start it at once. Whoever
moves starts with the next plan of its new place, or waits there by its rank: so nothing goes back
and forth, and no replica is idle while a sequence that fits it waits.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from control_plane.core import placement, room, succession, suspicion
from control_plane.core.placement import Leads, Load
from control_plane.core.plan import BlockId
from control_plane.core.ranked_list import RankedList
from control_plane.core.request import Origin, Request, SequenceId
from control_plane.core.scheduler import Scheduler
from control_plane.core.sequence import Sequence
from control_plane.core.succession import Traits


class MemberState(Enum):
    """The life of a replica in the fleet; the value names it to people."""

    JOINING = "joining"
    """Its worker was never there."""
    ATTACHED = "attached"
    SUSPECT = "suspect"
    """Its worker is attached, and has given no sign of life for a while."""
    LOST = "lost"
    """Its worker may come back: what nobody else can take waits for it."""
    DRAINING = "draining"
    """Its worker leaves: what it has goes elsewhere, as far as anybody can take it."""
    GONE = "gone"
    """Its worker has been lost for longer than anybody waits."""


_PRESENT = (MemberState.ATTACHED, MemberState.SUSPECT)
_TAKING = (*_PRESENT, MemberState.LOST, MemberState.DRAINING)
"""The last two, because a worker may be back soon. They come last."""
_REACH = 2
"""Sequences of the greatest length that a replica may be ahead or behind: more than any one prefix
saves, so that no prefix is too long to spread."""
_SLACK_PART = 8
"""Which part of such a sequence is no lead to speak of."""


@dataclass(frozen=True, slots=True)
class Member:
    """A replica whose worker was there once, as others see it. `number` names it."""

    number: int
    core: Scheduler
    traits: Traits
    state: MemberState
    is_closed: bool = False
    """It leaves the fleet, and no other worker comes to its place."""
    is_held: bool = False
    """Nobody may begin there now: it is paused, or is about to get other weights."""

    @property
    def is_present(self) -> bool:
        """Whether its worker executes steps, and may be given more."""
        return self.state in _PRESENT

    @property
    def takes_new(self) -> bool:
        """Whether new requests may be queued there."""
        return self.state in _TAKING and not self.is_closed

    @property
    def is_open(self) -> bool:
        """Whether rows are free for whoever comes, and nobody is on trial."""
        ledger = self.core.ledger
        return bool(ledger.free_rows) and not (ledger.suspects or self.is_held)

    @property
    def queue_moves(self) -> bool:
        """Whether the first that waits finds a row and blocks with the next plan, or nobody waits.

        That its prompt may be cached is not counted on.
        """
        waiting = self.core.ledger.waiting
        return not waiting or (
            self.state is MemberState.ATTACHED
            and self.is_open
            and room.can_start(self.core.ledger, len(waiting.first.token_ids), [])
        )

    @property
    def has_queue(self) -> bool:
        """Whether somebody waits there, for a row or for an adapter's slot."""
        ledger = self.core.ledger
        return bool(ledger.waiting or ledger.adapters.queues)

    def could_take(self, adapter_digest: str) -> bool:
        """Whether nobody with this adapter, or with none, would wait for a slot there for long."""
        ledger = self.core.ledger
        return not adapter_digest or ledger.adapters.could_take(
            adapter_digest, ledger.answered_step_id
        )

    @property
    def gives_slots(self) -> bool:
        """Whether the first that waits for an adapter finds a slot with the next plan."""
        ledger, adapters = self.core.ledger, self.core.ledger.adapters
        return self.state is MemberState.ATTACHED and any(
            adapters.is_unused(slot, ledger.answered_step_id) for slot in adapters.slots
        )

    @property
    def has_free_row(self) -> bool:
        """Whether a row is left, behind those that wait, wherever the worker is."""
        ledger = self.core.ledger
        is_open = not (ledger.suspects or self.is_held)
        return len(ledger.free_rows) > len(ledger.waiting) and is_open

    @property
    def has_free_place(self) -> bool:
        """Whether a row is left for a sequence that came now, behind those that wait."""
        return self.has_free_row and self.state is MemberState.ATTACHED

    def has_place_for(self, token_count: int, hits: list[BlockId]) -> bool:
        """Whether a row and blocks are left for a sequence that came now, behind those that wait.

        It has so many tokens, and these cached blocks. Of those that wait, no cached ones count.
        """
        ledger = self.core.ledger
        waiting = ledger.waiting.prompt_token_count + len(ledger.waiting) * ledger.config.block_size
        return self.has_free_place and room.can_start(ledger, waiting + token_count, hits)

    def would_start(self, token_count: int) -> bool:
        """Whether the next plan would begin with a sequence that came now: the plan has room, too.

        That its prompt may be cached is not counted on.
        """
        ledger = self.core.ledger
        planned = room.backlog_token_count(ledger) + len(ledger.running)
        return planned < ledger.config.max_step_token_count and self.has_place_for(token_count, [])

    def load(
        self, token_count: int, hashes: list[bytes], lead: int = 0, adapter_digest: str = ""
    ) -> Load:
        """How it looks to a sequence of so many tokens, whose prompt has these block hashes."""
        ledger = self.core.ledger
        hits = ledger.cache.find(hashes)
        return Load(
            replica=self.number,
            attached=self.state is MemberState.ATTACHED,
            starts=self.has_place_for(token_count, hits)
            and self.could_take(adapter_digest)
            and not suspicion.is_doubtful(ledger),
            backlog_token_count=room.backlog_token_count(ledger),
            running=len(ledger.running),
            free_kv_tokens=ledger.pool.free_count * ledger.config.block_size,
            cached_token_count=len(hits) * ledger.config.block_size,
            lead_token_count=lead,
            has_adapter=not adapter_digest or ledger.adapters.slot_of(adapter_digest) is not None,
        )


@dataclass(frozen=True, slots=True)
class Move:
    """A sequence that should go from one replica to another, by their numbers."""

    sequence_id: SequenceId
    source: int
    target: int


def places(members: Iterable[Member], request: Request, leads: Leads | None = None) -> list[Member]:
    """The replicas that might take a new request, the best first.

    Those that would cut it short come last, however full the others are. One that has tokens goes
    where they go on as they began, if there is such a place. `leads`, the memory of this fleet, is
    brought up to date.
    """
    taking = {member.number: member for member in members if member.takes_new}
    if len(taking) < 2:
        return list(taking.values())
    tokens = array("I", request.prompt_token_ids)
    length = len(tokens) + request.stop.max_tokens
    origin = None
    if request.resumed is not None:
        tokens.extend(request.resumed.token_ids)
        origin = request.resumed.origin
    longest = max(member.traits.max_sequence_token_count for member in taking.values())
    adapter_digest = "" if request.adapter is None else request.adapter.digest
    hashes = _Hashes(tokens, request.cache_salt, adapter_digest)
    computed = {
        number: member.core.ledger.counters.computed_tokens for number, member in taking.items()
    }
    lead = (leads or Leads()).update(computed, reach=_REACH * longest)
    ordered = placement.order(
        [
            member.load(len(tokens), hashes.of(member), lead[number], adapter_digest)
            for number, member in taking.items()
        ],
        slack=longest // _SLACK_PART,
    )
    found = [taking[number] for number in ordered]
    found.sort(key=lambda member: member.state is MemberState.LOST or member.is_held)
    if adapter_digest:
        found.sort(key=lambda member: not member.traits.takes_adapters)
    wanted = min(length, longest)
    found.sort(key=lambda member: member.traits.max_sequence_token_count < wanted)
    if origin is not None:
        found.sort(key=lambda member: not _makes_alike(member, origin))
    return found


def evacuation(source: Member, members: Iterable[Member], *, may_cross: bool) -> Iterator[Move]:
    """Where the sequences of a replica should go that can't go on there, in order of rank.

    One that nobody else can take has no move. Suspects come last: while their worker may be back
    for their trials, they go nowhere where it would disturb others, unless they appeal. Each move
    is to be made before the next is asked for.
    """
    others = [member for member in members if member.is_present and member.number != source.number]
    ledger = source.core.ledger
    is_tried_here = source.state is MemberState.LOST
    for sequence in sorted(
        ledger.sequences.values(),
        key=lambda sequence: (sequence.sequence_id in ledger.suspects, sequence.rank),
    ):
        stays = is_tried_here and sequence.sequence_id in ledger.suspects and not sequence.appeals
        able = {
            member.number: member
            for member in others
            if not (stays and member.core.ledger.sequences)
            and _can_go(sequence, source.traits, member.traits, may_cross=may_cross)
        }
        able = {key: own for key, own in able.items() if not own.is_held} or able
        if sequence.completion_count:
            for alike in (_has_weights_of, _rounds_alike):
                if any(alike(source, own) for own in able.values()):
                    able = {key: own for key, own in able.items() if alike(source, own)}
        if able:
            digest = sequence.adapter_digest
            hashes = _Hashes(sequence.token_ids, sequence.request.cache_salt, digest)
            token_count = len(sequence.token_ids)
            loads = [
                own.load(token_count, hashes.of(own), adapter_digest=digest)
                for own in able.values()
            ]
            yield Move(sequence.sequence_id, source.number, placement.order(loads)[0])


def relief(idle: Member, queued: Iterable[Member], *, may_cross: bool) -> Move | None:
    """Who should go to a replica with a free place: the first by rank that waits elsewhere.

    Of each other replica, that is the first of its queue that can go to the idle one; while that
    does not fit into what is free there, nobody overtakes it.
    """
    if not idle.has_free_place:
        return None
    best: tuple[Sequence, Member] | None = None
    for member in queued:
        if member is idle:
            continue
        first = _first_to_go(member, idle, may_cross=may_cross)
        if first is not None and (best is None or first.rank < best[0].rank):
            best = first, member
    if best is None or not idle.would_start(len(best[0].token_ids)):
        return None
    return Move(best[0].sequence_id, best[1].number, idle.number)


def _first_to_go(source: Member, target: Member, *, may_cross: bool) -> Sequence | None:
    """The first of a queue that can go elsewhere. None when the queue moves by itself.

    Who waits for a slot goes where there is one, also when the queue of those that wait for a row
    moves.
    """
    found = [] if source.queue_moves else [source.core.ledger.waiting]
    if not source.gives_slots:
        adapters = source.core.ledger.adapters
        found += [
            queue
            for digest, queue in adapters.queues.items()
            if not ((slot := adapters.slot_of(digest)) and slot.is_loading)
        ]
    firsts = [
        first
        for queue in found
        if (first := _first_of(queue, source, target, may_cross=may_cross)) is not None
    ]
    return min(firsts, key=lambda sequence: sequence.rank, default=None)


def _first_of(
    queue: RankedList, source: Member, target: Member, *, may_cross: bool
) -> Sequence | None:
    for sequence in queue:
        if not target.could_take(sequence.adapter_digest):
            continue
        if sequence.pending:
            continue  # its tokens come soon
        if sequence.sequence_id in source.core.ledger.suspects and (
            source.state is not MemberState.LOST or target.core.ledger.sequences
        ):
            continue  # it is on trial where it is, or would be among others
        if sequence.completion_count and not _has_weights_of(source, target):
            continue  # it rather waits than gets tokens of two minds
        if _can_go(sequence, source.traits, target.traits, may_cross=may_cross):
            return sequence
    return None


def _can_go(sequence: Sequence, before: Traits, after: Traits, *, may_cross: bool) -> bool:
    """Whether a sequence can go on elsewhere, to the same length."""
    return (
        after.max_sequence_token_count >= sequence.token_limit
        and succession.obstacle_of(sequence, before, after, may_cross=may_cross) is None
    )


def _makes_alike(member: Member, origin: Origin) -> bool:
    traits = member.traits
    return (traits.weight_digest, traits.arithmetic) == (origin.weights_digest, origin.arithmetic)


def _has_weights_of(one: Member, other: Member) -> bool:
    return one.traits.weight_digest == other.traits.weight_digest


def _rounds_alike(one: Member, other: Member) -> bool:
    return one.traits.arithmetic == other.traits.arithmetic


class _Hashes:
    """A prompt's block hashes, computed once for all replicas whose blocks are alike."""

    def __init__(self, token_ids: array[int], salt: str, adapter_digest: str) -> None:
        self._token_ids = token_ids
        self._chained = (salt, adapter_digest)
        self._found: dict[tuple[int, str], list[bytes]] = {}

    def of(self, member: Member) -> list[bytes]:
        config = member.core.ledger.config
        if not config.enable_prefix_caching:
            return []
        key = (config.block_size, member.core.ledger.weight_version.digest)
        if key not in self._found:
            self._found[key] = member.core.ledger.cache.hashes(self._token_ids, *self._chained)
        return self._found[key]
