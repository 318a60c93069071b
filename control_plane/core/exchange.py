"""Remembers which replicas may have a queue and which a free place, so that a turn of one does not
look at all others. Pure: it looks at cores, and changes none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from control_plane.core.fleet import Member, Move, relief


class Exchange:
    """Who waits, for a place that is free elsewhere.

    `member_of` gives a replica as it is now, by its number; None: it is gone. A replica is noted
    whenever it may have got a queue or a free place: when it was given a sequence, and before each
    of its plans. That its worker is a suspect, or away, is no reason to forget it: it may be back
    without a turn. So whoever has one is known, but for those that its last plan preempted; that
    some have none any more is found out by looking.
    """

    def __init__(self, member_of: Callable[[int], Member | None], *, may_cross: bool) -> None:
        self._member_of = member_of
        self._may_cross = may_cross
        # Dicts for their order: the same events give the same moves.
        self._queued: dict[int, None] = {}
        self._free: dict[int, None] = {}

    def note(self, member: Member) -> None:
        """Its queue or its places may have changed."""
        if member.has_queue:
            self._queued[member.number] = None
        if member.has_free_row:
            self._free[member.number] = None

    def moves(self, member: Member) -> Iterator[Move]:
        """What should move now that this replica takes a turn.

        Each move is to be made before the next is asked for. Both its replicas are noted.
        """
        self.note(member)
        while (move := self._next(member)) is not None:
            yield move
            for number in (move.source, move.target):
                if (other := self._member_of(number)) is not None:
                    self.note(other)

    def _next(self, member: Member) -> Move | None:
        """Who waits here goes first: that may make room for others."""
        if self._free and (not member.queue_moves or member.core.ledger.adapters.queues):
            for other in self._still(self._free, lambda other: other.has_free_row):
                move = relief(other, [member], may_cross=self._may_cross)
                if move is not None:
                    return move
        if self._queued and member.has_free_place:
            queued = self._still(self._queued, lambda other: other.has_queue)
            return relief(member, queued, may_cross=self._may_cross)
        return None

    def _still(self, numbers: dict[int, None], holds: Callable[[Member], bool]) -> list[Member]:
        """Of whom it still holds; the others are forgotten."""
        found = []
        for number in list(numbers):
            member = self._member_of(number)
            if member is not None and holds(member):
                found.append(member)
            else:
                del numbers[number]
        return found
