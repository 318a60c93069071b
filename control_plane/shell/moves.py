"""Moves sequences between replicas, as core/fleet.py decides: what a lost worker had, what leaves,
and what waits where another replica is free.
"""

from __future__ import annotations

import asyncio
import logging

from control_plane.core.claim import FINAL
from control_plane.core.exchange import Exchange
from control_plane.core.fleet import MemberState, Move, evacuation
from control_plane.core.request import SequenceId
from control_plane.shell.ports import Clock, MoveMetrics
from control_plane.shell.register import SequenceRegister
from control_plane.shell.replica import Replica
from control_plane.shell.roster import Roster
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_GRACE_SECONDS = 0.25
"""How long the sequences of a lost worker stay where their KV is: a connection that broke is whole
again by then, and a worker that died is not."""
_RELIEF = "relief"
"""The cause of a move to a free place. Else it is the state of the replica that is left."""
_AWAY = (MemberState.LOST, MemberState.GONE, MemberState.DRAINING)


class Mover:
    """Moves sequences between the replicas of a roster, and tells register and metrics.

    `may_cross`: a sequence with tokens may go on with a worker that rounds otherwise.
    """

    def __init__(
        self,
        roster: Roster,
        register: SequenceRegister,
        metrics: MoveMetrics,
        clock: Clock,
        *,
        may_cross: bool,
    ) -> None:
        self._roster = roster
        self._register = register
        self._metrics = metrics
        self._clock = clock
        self._may_cross = may_cross
        self._exchange = Exchange(roster.member, may_cross=may_cross)
        self._graces: dict[Replica, asyncio.TimerHandle] = {}
        """Of lost replicas whose sequences are still with them."""

    def stop(self) -> None:
        """No timer will fire any more."""
        while self._graces:
            self._graces.popitem()[1].cancel()

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
                if other.state in _AWAY and (other.life.is_replaced or other not in self._graces):
                    self.evacuate(other)
            return
        self._register.pause(_running(replica), self._clock() - replica.lost_seconds)
        if replica.ended_by in FINAL:
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
        cause = _cause(replica)
        ran, now = set(_running(replica)), self._clock()
        for move in evacuation(source, self._roster.members(), may_cross=self._may_cross):
            if move.sequence_id in ran:
                self._register.pause((move.sequence_id,), now)
            self._move(move, cause)
            count += 1
        if count:
            _logger.info(
                "sequences moved",
                extra=fields(replica=replica.number, sequence_count=count, cause=cause),
            )

    def placed(self, replica: Replica) -> None:
        """A replica was given a sequence, or may take some."""
        if (member := replica.member()) is not None:
            self._exchange.note(member)

    def relieve(self, replica: Replica) -> None:
        """Who waits here goes where a place is free, and who waits elsewhere comes here."""
        if len(self._roster) > 1 and (own := replica.member()) is not None:
            for move in self._exchange.moves(own):
                self._move(move, _RELIEF)

    def _grace_ends(self, replica: Replica) -> None:
        del self._graces[replica]
        self.evacuate(replica)

    def _move(self, move: Move, cause: str) -> None:
        target = self._roster.numbered(move.target)
        self._roster.numbered(move.source).give(move.sequence_id, target)
        self._register.moved(move.sequence_id, target)
        self._metrics.sequence_moved(move.source, move.target, cause)
        self.placed(target)


def _cause(replica: Replica) -> str:
    """Why sequences leave a replica."""
    if replica.life.is_replaced:
        return "replaced"
    # While its worker is there and stays, they leave because it fails with them.
    return replica.state.value if replica.state in _AWAY else "failing"


def _running(replica: Replica) -> list[SequenceId]:
    """The sequences that have a row there, or had one when its worker was lost."""
    member = replica.member()
    if member is None:
        return []
    return [sequence.sequence_id for sequence in member.core.ledger.running]
