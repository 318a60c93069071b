"""The thread on which weights are read, checked and loaded while the device goes on with steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from worker_service.domain.errors import WorkerError
from worker_service.domain.weights import TensorChunk, WeightsUpdate
from worker_service.runner.interface import (
    Preparation,
    PreparationCancelled,
    Prepared,
    Updatable,
)

T = TypeVar("T")


class WeightsThread:
    """Made and used on one event loop."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")

    async def prepare(
        self, runner: Updatable, update: WeightsUpdate, chunks: AsyncIterator[TensorChunk]
    ) -> Prepared:
        """Prepares an update. Whatever it raises, nothing is left of it by then. It can be
        cancelled once. Raises what Preparation and `chunks` raise."""
        cancelled, preparation = False, None
        try:
            preparation = await self.run(runner.begin_update, update, lambda: cancelled)
            await self._feed(preparation, chunks)
            return await self.run(preparation.finish)
        except BaseException as error:  # whatever it was, the memory is back before it is told
            cancelled = True
            await self.run(_nothing if preparation is None else preparation.close)
            if isinstance(error, PreparationCancelled):
                raise asyncio.CancelledError from None
            raise

    def run(self, work: Callable[..., T], *arguments: object) -> asyncio.Future[T]:
        """Runs work behind what was given before. Cancelling the future does not end it."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, partial(work, *arguments))
        future.add_done_callback(retrieve)
        return future

    def close(self) -> None:
        """Ends the thread after what it was given."""
        self._thread.shutdown(wait=False)

    async def _feed(self, preparation: Preparation, chunks: AsyncIterator[TensorChunk]) -> None:
        """Hands over chunks; while one is taken, the next is received."""
        taken: asyncio.Future[None] | None = None
        async for chunk in chunks:
            if taken is not None:
                await taken
            taken = self.run(preparation.put, chunk)
        if taken is not None:
            await taken


@dataclass(slots=True, eq=False)
class Preparing:
    """An update that is being prepared under a claim. `ended_by` is what its call raises when it
    did not end by itself."""

    update_id: str
    epoch: int
    task: asyncio.Task[Prepared]
    ended_by: WorkerError | None = None
    _is_cancelled: bool = False

    def cancel(self, ended_by: WorkerError | None = None) -> None:
        """Ends it soon. The first one who gives a reason says why."""
        if self.ended_by is None:
            self.ended_by = ended_by
        if not self._is_cancelled:
            self._is_cancelled = True
            self.task.cancel()

    async def over(self) -> None:
        """Returns once nothing of it runs."""
        if not self.task.done():
            await asyncio.wait((self.task,))


def retrieve(done: asyncio.Future[Any]) -> None:
    """Reads the error, so that asyncio does not report it where nobody waits any more."""
    if not done.cancelled():
        done.exception()


def _nothing() -> None:
    """Runs behind what the thread does."""
