"""The one thread that owns the device: it takes work in order, and futures bring the outcomes.

Work is launched first and collected later. A device that computes by itself, as a GPU does, gets
the next piece of work while it still computes the last. One that computes at launch, as the CPU
does, is collected at once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# How often we look whether a device that computes by itself is done, while no new work comes.
_POLL_SECONDS = 100e-6


class Pending(Protocol[T_co]):
    """Work that was launched."""

    def is_ready(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> T_co:
        """The outcome; raises what the work raised."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Done(Generic[T]):
    outcome: T

    def is_ready(self) -> bool:
        return True

    def result(self) -> T:
        return self.outcome


@dataclass(frozen=True, slots=True, eq=False)
class _Job(Generic[T]):
    launch: Callable[[], Pending[T]]
    future: asyncio.Future[T]
    finished: Callable[[], None]


class DeviceThread:
    """Launches work one piece at a time, and delivers outcomes, both in the order it was started.

    Made and used on one event loop. The caller bounds what waits here. The thread is a daemon: an
    exit never waits for a device that hangs.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._last: Callable[[], None] = lambda: None
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def start(
        self, work: Callable[[], T], finished: Callable[[], None] = lambda: None
    ) -> asyncio.Future[T]:
        """Queues work that is done when it returns; the rest is as in `start_pending`."""
        return self.start_pending(lambda: _Done(work()), finished)

    def start_pending(
        self, launch: Callable[[], Pending[T]], finished: Callable[[], None] = lambda: None
    ) -> asyncio.Future[T]:
        """Queues work. `finished` is called on the loop when it is over, even if nobody waits.

        Cancelling the future drops the outcome and nothing else: the work still runs.
        """
        assert not self._closed, "work after close"
        future: asyncio.Future[T] = self._loop.create_future()
        # Perhaps nobody waits any more. Reading the error keeps asyncio from reporting it unread.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._jobs.put(_Job(launch, future, finished))
        return future

    async def close(self, last: Callable[[], None] = lambda: None) -> None:
        """Ends the thread after what is queued, and `last` once all of that is over. Idempotent."""
        if not self._closed:
            self._closed = True
            self._last = last
            self._jobs.put(None)
        await asyncio.shield(self._ended)

    def _run(self) -> None:
        launched: deque[tuple[_Job[Any], Pending[Any]]] = deque()
        closing = False
        while launched or not closing:
            while launched and (closing or launched[0][1].is_ready()):
                self._collect(*launched.popleft())
            if closing:
                continue
            try:
                job = self._jobs.get(timeout=_POLL_SECONDS if launched else None)
            except queue.Empty:
                continue
            if job is None:
                closing = True
                continue
            try:
                launched.append((job, job.launch()))
            except Exception as error:  # the thread's boundary: the future gets the error
                while launched:  # outcomes keep their order
                    self._collect(*launched.popleft())
                self._post(_deliver, job, None, error)
            del job  # keep no plan alive while waiting for the next
        try:
            self._last()
        finally:
            self._post(self._end)

    def _collect(self, job: _Job[Any], pending: Pending[Any]) -> None:
        try:
            outcome = pending.result()
        except Exception as error:  # the thread's boundary, as above
            self._post(_deliver, job, None, error)
        else:
            self._post(_deliver, job, outcome, None)

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    def _post(self, callback: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop was closed before the device came back: nobody waits
            assert self._loop.is_closed()


def _deliver(job: _Job[Any], outcome: object, error: Exception | None) -> None:
    job.finished()
    if job.future.done():
        return
    if error is not None:
        job.future.set_exception(error)
    else:
        job.future.set_result(outcome)
