"""Does on replicas what a rollout decides, and says how each of them is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from control_plane.core.events import FinishReason
from control_plane.core.rollout import (
    Abort,
    Action,
    Busy,
    CallOff,
    Commit,
    Prepare,
    View,
)
from control_plane.shell.ports import (
    Clock,
    RefusalReason,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.replica import Replica
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_FINAL = frozenset(
    {RefusalReason.INVALID_UPDATE, RefusalReason.OUT_OF_MEMORY, RefusalReason.UNKNOWN}
)
"""Asking again would be refused again."""
_MOST_ATTEMPTS = 4
_FIRST_COOLING_SECONDS = 0.25


@dataclass(slots=True, eq=False)
class _Hand:
    """What is done on one replica, and what came of it."""

    task: asyncio.Task[None] | None = None
    busy: Busy = Busy.NO
    claim: tuple[str, int, str] = ("", 0, "")
    """The worker's life, the claim and the weights of which the next two tell."""
    since: float = 0.0
    faults_before: int = 0
    incarnation_id: str = ""
    """The worker's life in which it failed."""
    failure: str = ""
    failed_id: str = ""
    attempt_count: int = 0
    cools_until: float = field(default=-1.0)


class Hands:
    """`replicas` gives those that are there. `wake` is called when something may have changed."""

    def __init__(
        self, replicas: Callable[[], Sequence[Replica]], clock: Clock, wake: Callable[[], None]
    ) -> None:
        self._replicas = replicas
        self._clock = clock
        self._wake = wake
        self._hands: dict[int, _Hand] = {}
        self._stops = False
        self.bug: BaseException | None = None
        """What nobody expected of a task."""

    def forget(self) -> None:
        """Another rollout begins: what failed before says nothing of it."""
        for hand in self._hands.values():
            hand.failure = hand.failed_id = ""
            hand.attempt_count, hand.cools_until = 0, -1.0
            hand.claim = ("", 0, "")

    def views(self) -> list[View]:
        """Every replica that stays, as it is now."""
        replicas = [each for each in self._replicas() if not each.is_leaving]
        numbers = {each.number for each in replicas}
        for number in [n for n, hand in self._hands.items() if n not in numbers]:
            if self._hands[number].task is None:
                del self._hands[number]
        return [self._view(replica) for replica in replicas]

    def do(self, action: Action) -> None:
        """Begins it. Whoever is busy gets nothing else to do, but may be called off."""
        hand = self._hands.setdefault(action.number, _Hand())
        replica = next((r for r in self._replicas() if r.number == action.number), None)
        if isinstance(action, CallOff):
            if hand.task is not None:
                hand.task.cancel()
            return
        if replica is None or hand.task is not None:
            return
        hand.busy = Busy.EXCHANGING if isinstance(action, Commit) else Busy.PREPARING
        hand.task = asyncio.create_task(self._run(replica, hand, action))
        hand.task.add_done_callback(lambda task: self._ended(hand, task))

    async def stop(self) -> None:
        """Ends what is under way. What has been prepared stays so: it may be gone on with."""
        self._stops = True
        tasks = [hand.task for hand in self._hands.values() if hand.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _view(self, replica: Replica) -> View:
        hand = self._hands.setdefault(replica.number, _Hand())
        observed, attachment = replica.weights.observed(), replica.serving.attachment
        if observed.version is None or attachment is None:
            return View(replica.number, is_attached=False, busy=hand.busy)
        info, now = attachment.info, self._clock()
        stats = replica.stats()
        fault_count = 0 if stats is None else stats.finished[FinishReason.FAULT]
        claim = (info.incarnation_id, info.epoch, observed.version.digest)
        if claim != hand.claim:
            hand.claim, hand.since, hand.faults_before = claim, now, fault_count
        if hand.failure and hand.incarnation_id != info.incarnation_id:
            hand.failure = hand.failed_id = ""
            hand.attempt_count = 0
        busy = hand.busy
        if busy is Busy.NO and observed.is_switching:  # for somebody else
            busy = Busy.EXCHANGING
        prepared = observed.prepared
        return View(
            number=replica.number,
            digest=observed.version.digest,
            prepared=None if prepared is None else (prepared.update_id, prepared.digest),
            busy=busy,
            failure=hand.failure,
            failed_id=hand.failed_id,
            cools=now < hand.cools_until,
            fault_count=fault_count - hand.faults_before,
            seconds=now - hand.since,
        )

    async def _run(self, replica: Replica, hand: _Hand, action: Prepare | Commit | Abort) -> None:
        update_id = action.update.update_id if isinstance(action, Prepare) else action.update_id
        attachment = replica.serving.attachment
        incarnation_id = "" if attachment is None else attachment.info.incarnation_id
        weights = replica.weights
        try:
            match action:
                case Prepare(update=update):
                    await weights.prepare(update)
                case Commit(digest=digest, policy=policy):
                    await weights.switch(update_id, digest, policy)
                case Abort():
                    await weights.abort(update_id)
            hand.attempt_count = 0
        except asyncio.CancelledError:
            if isinstance(action, Prepare) and not self._stops:
                with suppress(WorkerLost, WorkerRefused, WorkerUnusable):
                    await weights.abort(update_id)
            raise
        except (WorkerLost, WorkerUnusable):
            self._cool(hand)
        except WorkerRefused as error:
            hand.attempt_count += 1
            is_final = error.reason in _FINAL or hand.attempt_count >= _MOST_ATTEMPTS
            _logger.warning(
                "weights refused",
                extra=fields(
                    replica=replica.number,
                    update_id=update_id,
                    reason=str(error),
                    attempt=hand.attempt_count,
                    is_final=is_final,
                ),
            )
            if is_final:
                hand.failure, hand.failed_id = str(error), update_id
                hand.incarnation_id = incarnation_id
                hand.attempt_count = 0
            else:
                self._cool(hand)

    def _cool(self, hand: _Hand) -> None:
        seconds = _FIRST_COOLING_SECONDS * 2 ** max(0, hand.attempt_count - 1)
        hand.cools_until = self._clock() + seconds
        # A moment later, so that it has cooled by then whatever the two clocks round.
        asyncio.get_running_loop().call_later(seconds + 0.001, self._wake)

    def _ended(self, hand: _Hand, task: asyncio.Task[None]) -> None:
        hand.task, hand.busy = None, Busy.NO
        if not task.cancelled() and (error := task.exception()) is not None:
            self.bug = error
        self._wake()
