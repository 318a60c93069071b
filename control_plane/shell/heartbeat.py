"""Notices a worker that gives no sign of life while its connection looks whole.

A process that is stopped, swapped out or cut off from the network keeps its connections for a long
time. While its results come, nothing else is asked. Only when none came for a while, the worker is
pinged. Its event loop answers while its device computes, so that a long step is no silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from control_plane.shell.ports import Worker, WorkerLost, WorkerRefused, WorkerSilent

_LOOKS = 5
"""Looks in a row without a sign of life that make a silence.

Looks are counted, not seconds: when this process itself was stopped, that is one look, and what has
arrived meanwhile is read before the next.
"""


class Heartbeat:
    """Watches one claim's worker. `limit`: seconds without a sign of life that are too many."""

    def __init__(self, worker: Worker, limit: float) -> None:
        self._worker = worker
        self._limit = limit
        self._has_heard = False

    def heard(self) -> None:
        """The worker has given a sign of life."""
        self._has_heard = True

    async def watched(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which needs the worker. Raises what it raises, or WorkerSilent."""
        working = asyncio.create_task(work)
        silence = asyncio.create_task(self._silence())
        try:
            await asyncio.wait((working, silence), return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                return working.result()
            silence.result()
            raise WorkerSilent(self._limit)
        finally:
            working.cancel()
            silence.cancel()
            await asyncio.wait((working, silence))

    async def _silence(self) -> None:
        """Returns once the worker has been silent for too long, a fifth of that late at most."""
        ping: asyncio.Task[bool] | None = None
        silent_looks = 0
        try:
            while silent_looks < _LOOKS:
                self._has_heard = False
                await asyncio.sleep(self._limit / _LOOKS)
                if ping is not None and ping.done():
                    self._has_heard |= ping.result()
                    ping = None
                silent_looks = 0 if self._has_heard else silent_looks + 1
                if silent_looks and ping is None:
                    ping = asyncio.create_task(self._ping())
        finally:
            if ping is not None:
                ping.cancel()
                await asyncio.wait((ping,))

    async def _ping(self) -> bool:
        """Whether the worker answers. A connection that is broken is the pipeline's to tell."""
        try:
            await self._worker.ping()
        except WorkerLost:
            return False
        except WorkerRefused:
            pass  # a refusal is an answer
        return True
