"""Notices a worker that gives no sign of life, or does not finish a step, though its connection
looks whole.

A process that is stopped, swapped out or cut off from the network keeps its connections for a long
time. While its results come, nothing else is asked. Only when none came for a while, the worker is
pinged. Its event loop answers while its device computes, so that a long step is no silence. Whether
a step takes too long is core/progress.py's to say.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from control_plane.core.plan import Message, StepResult
from control_plane.core.progress import Progress
from control_plane.shell.ports import (
    Clock,
    Worker,
    WorkerHung,
    WorkerLost,
    WorkerRefused,
    WorkerSilent,
)

_LOOKS = 5
"""Looks in a row without a sign of life that make a silence.

Looks are counted, not seconds: when this process itself was stopped, that is one look, and what has
arrived meanwhile is read before the next.
"""
_CALM_LOOKS = 10
"""Looks for which the answer of a worker that has nothing to do holds. A ping costs a quarter of a
millisecond, and there may be hundreds of workers. The next message to it ends that."""
_SUSPICIOUS_LOOKS = 2
_SUSPICIOUS_PART = 0.6
"""Of the time that a step may take."""
_TINY = 1e-3
"""Seconds that a timer may be early."""


class Heartbeat:
    """Watches one worker, claim after claim.

    `limit`: seconds without a sign of life that are too many. `on_doubt` is called when the
    worker becomes suspicious, and when it no longer is; not when the watching ends.
    """

    def __init__(
        self,
        worker: Worker,
        limit: float,
        clock: Clock,
        on_doubt: Callable[[], None] = lambda: None,
    ) -> None:
        self._worker = worker
        self._limit = limit
        self._clock = clock
        self._on_doubt = on_doubt
        self._has_doubts = False
        self._progress = Progress()
        self._has_heard = False
        self._silent_looks = 0
        self._calm_looks = 0
        """Still to come."""

    @property
    def is_suspicious(self) -> bool:
        """Whether the worker is about to be taken for lost."""
        if self._silent_looks >= _SUSPICIOUS_LOOKS:
            return True
        waited = self._progress.waited(self._clock())
        # Nothing is overdue within a second, and to ask for the limit costs more.
        return waited > _SUSPICIOUS_PART and waited > _SUSPICIOUS_PART * self._progress.limit()

    def attached(self, *, same_life: bool, stage_count: int) -> None:
        """A claim begins. Of another life of the worker nothing is known."""
        self._progress.attached(same_life=same_life, stage_count=stage_count)

    def sends(self, message: Message) -> None:
        """A message goes to the worker now."""
        self._calm_looks = 0
        self._progress.sent(message, self._clock())

    def heard(self, result: StepResult) -> None:
        """The worker has answered the oldest message."""
        self._has_heard = True
        self._progress.answered(self._clock(), result.executed_seconds)

    async def watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which needs the worker. Raises what it does, WorkerSilent or WorkerHung."""
        working = asyncio.create_task(work)
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            raise watching.result()
        finally:
            working.cancel()
            watching.cancel()
            await asyncio.wait((working, watching))
            self._silent_looks = 0
            self._has_doubts = False

    async def _watch(self) -> WorkerLost:
        """Returns once the worker has been silent for too long, a fifth of that late at most, or
        has not finished a step in time."""
        ping: asyncio.Task[bool] | None = None
        self._silent_looks = self._calm_looks = 0
        try:
            while self._silent_looks < _LOOKS:
                self._has_heard = False
                if (hung := await self._look()) is not None:
                    return hung
                if ping is not None and ping.done():
                    answers = ping.result()
                    self._has_heard |= answers
                    ping = None
                    if answers and not self._progress.waited(self._clock()):
                        self._calm_looks = _CALM_LOOKS
                elif self._calm_looks:
                    self._calm_looks -= 1
                    self._has_heard = True
                self._silent_looks = 0 if self._has_heard else self._silent_looks + 1
                if self.is_suspicious is not self._has_doubts:
                    self._has_doubts = not self._has_doubts
                    self._on_doubt()
                if self._silent_looks and ping is None:
                    ping = asyncio.create_task(self._ping())
            return WorkerSilent(self._limit)
        finally:
            if ping is not None:
                ping.cancel()
                await asyncio.wait((ping,))

    async def _look(self) -> WorkerHung | None:
        """Takes a fifth of the limit, or ends with what hangs, once that is overdue."""
        seconds = self._limit / _LOOKS
        progress, began = self._progress, self._clock()
        left = progress.limit() - progress.waited(began)
        if left < seconds:
            await asyncio.sleep(max(0.0, left))
            seconds -= max(0.0, left)
            now = self._clock()
            limit, waited = progress.limit(), progress.waited(now)
            if now - began < 2 * self._limit / _LOOKS and waited + _TINY >= limit:
                return WorkerHung(waited)
        await asyncio.sleep(seconds)
        took = self._clock() - began
        if took > 2 * self._limit / _LOOKS:
            progress.stopped(took, self._clock())
        return None

    async def _ping(self) -> bool:
        """Whether the worker answers. A connection that is broken is the pipeline's to tell."""
        try:
            await self._worker.ping()
        except WorkerLost:
            return False
        except WorkerRefused:
            pass  # a refusal is an answer
        return True
