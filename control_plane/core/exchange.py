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
    of its plans. So whoever has one is known; that some have none any more is found out by looking.
    """

    def __init__(self, member_of: Callable[[int], Member | None], *, may_cross: bool) -> None:
        self._member_of = member_of
        self._may_cross = may_cross
        # Dicts for their order: the same events give the same moves.
        self._queued: dict[int, None] = {}
        self._free: dict[int, None] = {}

    def note(self, member: Member) -> None:
        """Its queue or its places may have changed."""
        if member.core.ledger.waiting:
            self._queued[member.number] = None
        if member.has_free_place:
            self._free[member.number] = None

    def moves(self, member: Member) -> Iterator[Move]:
        """What should move now that this replica has taken a turn.

        Each move is to be made before the next is asked for.
        """
        self.note(member)
        if self._queued and member.has_free_place:
            queued = [
                other for other in self._looked_up(self._queued) if other.core.ledger.waiting
            ]
            self._queued = dict.fromkeys(other.number for other in queued)
            while (move := relief(member, queued, may_cross=self._may_cross)) is not None:
                yield move
                self.note(member)
        if self._free and member.core.ledger.waiting:
            free = [other for other in self._looked_up(self._free) if other.has_free_place]
            self._free = dict.fromkeys(other.number for other in free)
            for other in free:
                while (move := relief(other, [member], may_cross=self._may_cross)) is not None:
                    yield move
                    self.note(other)

    def _looked_up(self, numbers: dict[int, None]) -> Iterator[Member]:
        for number in numbers:
            member = self._member_of(number)
            if member is not None:
                yield member
