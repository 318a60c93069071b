"""What a replica does between two steps, with nothing in flight: its weights are exchanged, or it
pauses.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from control_plane.core.events import SequenceOutput
from control_plane.core.plan import WeightVersion
from control_plane.core.scheduler import Scheduler
from control_plane.core.weights import InFlightPolicy
from control_plane.shell.ports import RefusalReason, WorkerLost, WorkerRefused, WorkerUnusable

HARMLESS = frozenset(
    {
        RefusalReason.INVALID_UPDATE,
        RefusalReason.UPDATE_CONFLICT,
        RefusalReason.SOURCE_LOST,
        RefusalReason.OUT_OF_MEMORY,
    }
)
"""Refusals of an update that leave the worker as it was, and its claim."""

Commit = Callable[[], Awaitable[WeightVersion]]


class Interlude:
    """One such, asked for once. `outcome` is the weight version behind it.

    `policy` says what becomes of what runs. `commit` is awaited in it; a harmless refusal becomes
    the outcome, and anything else that it raises ends the claim. Without `changes`, what runs stays
    as it is.
    """

    def __init__(self, policy: InFlightPolicy, commit: Commit, *, changes: bool = True) -> None:
        self._policy = policy
        self._commit = commit
        self._changes = changes
        self._closed: Scheduler | None = None
        self.trouble = "the claim has ended"
        """Why its outcome is not known, if it is never."""
        self.has_begun = False
        """Whether it can't be called off any more."""
        self.outcome: asyncio.Future[WeightVersion] = asyncio.get_running_loop().create_future()

    def is_due(self, core: Scheduler) -> bool:
        """Whether no step may be planned before it."""
        if self._policy is not InFlightPolicy.FINISH_ON_OLD:
            return True
        self._closed = core
        return core.close()

    async def run(self, core: Scheduler) -> list[SequenceOutput]:
        """Returns who has ended by it. Raises what ends the claim."""
        assert not core.inflight_count
        self.has_begun = True
        try:
            version = await self._commit()
        except WorkerRefused as error:
            if error.reason not in HARMLESS:
                self.trouble = str(error)
                raise
            self.fail(error)
            return []
        except (WorkerLost, WorkerUnusable) as error:
            self.trouble = str(error)
            raise
        outputs: list[SequenceOutput] = []
        if self._changes:
            policy = self._policy
            if policy is InFlightPolicy.FINISH_ON_OLD:
                # Whoever came from a lost worker during the commit can't finish here any more.
                policy = InFlightPolicy.ABORT
            outputs = core.switch_weights(version, policy)
        if not self.outcome.done():
            self.outcome.set_result(version)
        return outputs

    def fail(self, error: Exception) -> None:
        """It does not come about: who waits for its outcome gets this error, if it has none yet."""
        if self._closed is not None:
            self._closed.close(is_closing=False)
        if not self.outcome.done():
            self.outcome.set_exception(error)
            self.outcome.exception()  # asyncio reports errors that nobody has read
