"""Moves sequences between replicas, as core/fleet.py decides: what a lost worker had, what leaves,
and what waits where another replica is free.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from control_plane.core.exchange import Exchange
from control_plane.core.fleet import MemberState, Move, evacuation
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
        self._exchange = Exchange(roster.member, may_cross=may_cross)
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
        self.placed(replica)
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

    def placed(self, replica: Replica) -> None:
        """A replica was given a sequence, or may take some."""
        if (member := replica.member()) is not None:
            self._exchange.note(member)

    def relieve(self, replica: Replica) -> None:
        """Who waits here goes where a place is free, and who waits elsewhere comes here."""
        if len(self._roster) > 1 and (own := replica.member()) is not None:
            for move in self._exchange.moves(own):
                self._move(move)

    def _grace_ends(self, replica: Replica) -> None:
        del self._graces[replica]
        self.evacuate(replica)

    def _move(self, move: Move) -> None:
        target = self._roster.numbered(move.target)
        self._roster.numbered(move.source).give(move.sequence_id, target)
        self._on_move(move.sequence_id, target)
        self.placed(target)
