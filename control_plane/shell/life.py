"""What is known and told of a replica's life: its state, why it is in it, and for how long not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from control_plane.core.claim import ClaimState
from control_plane.core.fleet import MemberState
from control_plane.shell.ports import WorkerElsewhere
from twinplane.process.logs import fields

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Left(Exception):
    """The replica has left, and has nothing to wait for."""


class Life:
    """The life of replica `number`, whose worker is to be found at `address`.

    What the replica waits for runs `during` this life, and can be ended from outside.
    """

    def __init__(self, number: int, address: str) -> None:
        self.number = number
        self.address = address
        self.worker_id = ""
        """Of the last worker that was attached; empty before the first."""
        self.reason = ""
        """Why it is in its state, for people. While it has no worker, what the last attempt met."""
        self.claiming = ""
        """The incarnation that it is about to claim."""
        self.is_replaced = False
        """Its worker was lost because the same one came back as another replica."""
        self._told: MemberState | None = None
        self._waiting: asyncio.Future[Any] | None = None
        self._error: Exception | None = None

    def note(self, state: MemberState, reason: str) -> None:
        """It is in this state; a change is told."""
        self.reason = reason
        before, self._told = self._told, state
        if before is state:
            return
        _logger.info(
            "replica changed state",
            extra=fields(
                replica=self.number,
                address=self.address,
                worker_id=self.worker_id,
                before="" if before is None else before.value,
                now=state.value,
                reason=reason,
            ),
        )

    def looked_at(self, state: MemberState) -> None:
        """Its worker has become suspicious, or no longer is. One that leaves stays DRAINING."""
        if state is MemberState.SUSPECT:
            self.note(state, "it is silent, or late with a step")
        elif state is MemberState.ATTACHED:
            self.note(state, "it goes on")

    def replaced(self, by: int, *, is_attached: bool) -> None:
        """Its worker came back as replica `by`: if it still has a claim, that ends."""
        self.is_replaced = True
        self.reason = f"its worker {self.worker_id!r} has come back as replica {by}"
        if is_attached:
            self.end_wait(WorkerElsewhere(self.reason))

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of `work`, or what `end_wait` was given meanwhile."""
        task = self._waiting = asyncio.create_task(work)
        self._error = None
        try:
            await asyncio.wait((task,))
            if task.cancelled() and self._error is not None:
                raise self._error
            outcome: T = task.result()
            return outcome
        finally:
            self._waiting = None
            if not task.done():
                task.cancel()
                await asyncio.wait((task,))

    def end_wait(self, error: Exception) -> None:
        """Ends what runs `during` this life now, if anything does, with this error."""
        if self._waiting is not None and not self._waiting.done():
            self._error = error
            self._waiting.cancel()


def member_state(claim: ClaimState, *, is_suspicious: bool) -> MemberState:
    """The state of a replica that does not leave, by that of its claim."""
    match claim:
        case ClaimState.NEVER_ATTACHED:
            return MemberState.JOINING
        case ClaimState.ATTACHED:
            return MemberState.SUSPECT if is_suspicious else MemberState.ATTACHED
        case ClaimState.LEAVING:
            return MemberState.DRAINING
        case ClaimState.LOST:
            return MemberState.LOST
        case ClaimState.GONE:
            return MemberState.GONE
