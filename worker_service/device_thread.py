"""The one thread that owns the device: work goes in, in order, and comes back as futures."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class _Job(Generic[T]):
    work: Callable[[], T]
    future: asyncio.Future[T]
    finished: Callable[[], None]


class DeviceThread:
    """Runs work one at a time, in the order it was started. Made and used on one event loop.

    The caller bounds what waits here. The thread is a daemon: an exit never waits for a device
    that hangs.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[_Job[Any] | None] = queue.SimpleQueue()
        self._closed = False
        self._ended: asyncio.Future[None] = self._loop.create_future()
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def start(
        self, work: Callable[[], T], finished: Callable[[], None] = lambda: None
    ) -> asyncio.Future[T]:
        """Queues work; `finished` is called on the loop when it has run, whoever still waits.

        Cancelling the future forgets the outcome and no more: started work runs.
        """
        assert not self._closed, "work after close"
        future: asyncio.Future[T] = self._loop.create_future()
        # Whoever waited may be gone; an outcome that nobody reads is no news.
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._jobs.put(_Job(work, future, finished))
        return future

    async def close(self) -> None:
        """Ends the thread after what is queued. Idempotent."""
        if not self._closed:
            self._closed = True
            self._jobs.put(None)
        await asyncio.shield(self._ended)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                outcome = job.work()
            except Exception as error:  # the thread's boundary: it belongs to whoever waits
                self._post(_deliver, job, None, error)
            else:
                self._post(_deliver, job, outcome, None)
            del job  # keep no plan alive while waiting for the next
        self._post(self._end)

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
