"""Moves sequences between replicas, as core/fleet.py decides: what a lost worker had, what leaves,
and what waits where another replica is free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from control_plane.core.fleet import MemberState, Move, evacuation, relief
from control_plane.core.request import SequenceId
from control_plane.shell.replica import Replica
from control_plane.shell.roster import Roster
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_GRACE_SECONDS = 0.25
"""How long the sequences of a lost worker stay where their KV is: a connection that broke is whole
again by then, and a worker that died is not."""
_AWAY = (MemberState.LOST, MemberState.GONE, MemberState.DRAINING)


class Mover:
    """Moves sequences between the replicas of a roster. `on_move` is told each move.

    `may_cross`: a sequence with tokens may go on with a worker that rounds otherwise.
    """

    def __init__(
        self, roster: Roster, on_move: Callable[[SequenceId, Replica], None], *, may_cross: bool
    ) -> None:
        self._roster = roster
        self._on_move = on_move
        self._may_cross = may_cross
        self._graces: dict[Replica, asyncio.TimerHandle] = {}
        """Of lost replicas whose sequences are still with them."""

    def stop(self) -> None:
        """No timer will fire any more."""
        for grace in self._graces.values():
            grace.cancel()
        self._graces.clear()

    def changed(self, replica: Replica) -> None:
        """A replica's worker was attached or lost.

        If attached, it takes what others can't go on with; what it lost itself waits a moment, if
        its worker may be back by then.
        """
        if (grace := self._graces.pop(replica, None)) is not None:
            grace.cancel()
        if replica.attached:
            for other in self._roster.replicas:
                if other.state in _AWAY and other not in self._graces:
                    self.evacuate(other)
        elif not replica.may_reconnect:
            self.evacuate(replica)
        else:
            loop = asyncio.get_running_loop()
            self._graces[replica] = loop.call_later(_GRACE_SECONDS, self._grace_ends, replica)

    def evacuate(self, replica: Replica) -> None:
        """What runs and waits at a replica goes elsewhere, as far as somebody can take it."""
        source = replica.member()
        if source is None:
            return
        count = 0
        for move in evacuation(source, self._roster.members(), may_cross=self._may_cross):
            self._move(move)
            count += 1
        if count:
            _logger.info(
                "sequences moved",
                extra=fields(
                    replica=replica.number, sequence_count=count, cause=source.state.value
                ),
            )

    def relieve(self, replica: Replica) -> None:
        """Who waits here goes where a place is free, and who waits elsewhere comes here."""
        if len(self._roster.replicas) == 1:
            return
        own = replica.member()
        if own is None or not own.is_present:
            return
        waits = bool(own.core.ledger.waiting)
        if not waits and not own.has_free_place:
            return
        others = [member for member in self._roster.members() if member.number != own.number]
        if not waits:
            queued = [member for member in others if member.core.ledger.waiting]
            while (move := relief(own, queued, may_cross=self._may_cross)) is not None:
                self._move(move)
            return
        for other in others:
            if other.is_present:
                while (move := relief(other, [own], may_cross=self._may_cross)) is not None:
                    self._move(move)

    def _grace_ends(self, replica: Replica) -> None:
        del self._graces[replica]
        self.evacuate(replica)

    def _move(self, move: Move) -> None:
        target = self._roster.numbered(move.target)
        self._roster.numbered(move.source).give(move.sequence_id, target)
        self._on_move(move.sequence_id, target)
