"""Updates of a worker's weights: one at a time, under a claim, beside the steps.

Runs on the event loop. What reads, checks and loads runs on a thread of its own; what exchanges
weights or memory, on the device thread between two steps.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from worker_service.domain.errors import (
    MemoryLacking,
    StaleEpoch,
    UpdateConflict,
    UpdateInvalid,
    WorkerDraining,
    WorkerError,
)
from worker_service.domain.plan import WeightVersion
from worker_service.domain.weights import (
    CommittedWeights,
    PreparedWeights,
    SleepTag,
    TensorChunk,
    TensorDescription,
    UpdateOutcome,
    WeightsUpdate,
)
from worker_service.runner.interface import Prepared, Updatable
from worker_service.step_log import StepLog
from worker_service.weights_thread import Preparing, WeightsThread, retrieve

T = TypeVar("T")


class UpdateMetrics(Protocol):
    """Who counts updates. Told on the event loop; never raises."""

    def update_prepared(self, seconds: float) -> None:
        """An update waits for its commit; it took so long."""
        ...

    def update_ended(self, outcome: UpdateOutcome, seconds: float = 0.0) -> None:
        """An update ended; a commit held up steps for so long."""
        ...


class _NoMetrics:
    """Counts nothing."""

    def update_prepared(self, seconds: float) -> None:
        """See UpdateMetrics."""

    def update_ended(self, outcome: UpdateOutcome, seconds: float = 0.0) -> None:
        """See UpdateMetrics."""


class Host(Protocol):
    """What updates need of the facade."""

    @property
    def log(self) -> StepLog:
        """The device's. Raises WorkerUnavailable or RunnerFailed where the worker does not
        serve."""
        ...

    def require_claim(self, epoch: int) -> None:
        """Raises StaleEpoch. Any thread."""
        ...

    async def on_device(self, work: Callable[[], T], epoch: int | None = None) -> asyncio.Future[T]:
        """Queues work for the device, behind what was sent before. With an epoch, the future
        raises StaleEpoch, and nothing is done, unless that holds the claim by then."""
        ...


@dataclass(frozen=True, slots=True)
class _Commit:
    """A commit that was asked for, and what comes of it."""

    update_id: str
    digest: str
    task: asyncio.Task[CommittedWeights]


class WeightUpdates:
    """The update that is prepared or waits, and the last commit."""

    def __init__(
        self,
        host: Host,
        *,
        clock: Callable[[], float] = time.monotonic,
        metrics: UpdateMetrics | None = None,
    ) -> None:
        self._host = host
        self._clock = clock
        self._metrics = metrics or _NoMetrics()
        self._thread = WeightsThread()
        self._preparing: Preparing | None = None
        self._prepared: Prepared | None = None
        self._commit: _Commit | None = None

    @property
    def prepared(self) -> PreparedWeights | None:
        """What waits for its commit."""
        return None if self._prepared is None else self._prepared.facts

    async def prepare(
        self, epoch: int, update: WeightsUpdate, chunks: AsyncIterator[TensorChunk]
    ) -> PreparedWeights:
        """Prepares an update; `chunks` are a stream's. Cancelling this ends the preparation.

        Returns or raises once nothing of it runs any more. Raises UpdateInvalid, UpdateConflict,
        MemoryLacking, SourceLost, StaleEpoch, or what `chunks` raises.
        """
        runner = self._claimed(epoch).runner
        assert isinstance(runner, Updatable), "a runner that takes no other weights"
        self._require_free()
        started = self._clock()
        task = asyncio.create_task(self._thread.prepare(runner, update, chunks))
        self._preparing = preparing = Preparing(update.update_id, epoch, task)
        task.add_done_callback(lambda _: self._ended(preparing))
        try:
            prepared = await asyncio.shield(task)
        except asyncio.CancelledError:
            preparing.cancel()
            await preparing.over()
            if self._prepared is not None:  # it was done, and nobody is told
                await self._discard(self._prepared)
            self._metrics.update_ended(UpdateOutcome.ABORTED)
            if preparing.ended_by is not None:
                raise preparing.ended_by from None
            raise
        except WorkerError:
            self._metrics.update_ended(UpdateOutcome.REFUSED)
            raise
        self._metrics.update_prepared(self._clock() - started)
        return prepared.facts

    async def commit(self, epoch: int, update_id: str, digest: str) -> CommittedWeights:
        """Makes what is prepared live. The same again gets the same answer, also while it runs.

        Raises UpdateConflict, StaleEpoch, Asleep, RunnerFailed, or, where a commit in place failed
        and the weights before it are back, UpdateInvalid or MemoryLacking.
        """
        log = self._claimed(epoch)
        last, prepared = self._commit, self._prepared
        if prepared is None or prepared.facts.update_id != update_id:
            if last is not None and (last.update_id, last.digest) == (update_id, digest):
                return await asyncio.shield(last.task)
            raise self._conflict(f"the update {update_id[:128]!r} is not prepared")
        if prepared.facts.digest != digest:
            raise self._conflict(
                f"the update {update_id[:128]!r} is prepared with the digest "
                f"{prepared.facts.digest}"
            )
        if last is None or last.task.done():
            task = asyncio.create_task(self._exchange(log, epoch, prepared))
            task.add_done_callback(retrieve)
            self._commit = last = _Commit(update_id, digest, task)
        return await asyncio.shield(last.task)

    async def abort(self, epoch: int, update_id: str) -> None:
        """Drops what is prepared under this name, or ends its preparation. Idempotent. Raises
        StaleEpoch, or UpdateConflict where it is being committed."""
        self._claimed(epoch)
        preparing, prepared = self._preparing, self._prepared
        if preparing is not None and preparing.update_id == update_id:
            preparing.cancel(UpdateConflict("the update was aborted", update_id))
            await preparing.over()
        elif prepared is not None and prepared.facts.update_id == update_id:
            if self._commit is not None and not self._commit.task.done():
                raise self._conflict("the update is being committed")
            self._metrics.update_ended(UpdateOutcome.ABORTED)
            await self._discard(prepared)

    def tensors(self) -> tuple[WeightVersion, tuple[TensorDescription, ...]]:
        """The live weights, tensor by tensor."""
        runner = self._host.log.runner
        assert isinstance(runner, Updatable), "a runner that can't tell"
        return runner.capability().weight_version, runner.tensors()

    async def sleep(self, epoch: int, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """Frees memory, behind what was sent before. Raises StaleEpoch or PlanMismatch."""
        log = self._claimed(epoch)
        return await (await self._host.on_device(lambda: log.sleep(tags), epoch))

    async def wake(self, epoch: int, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """Takes memory again. Raises StaleEpoch, MemoryLacking or RunnerFailed."""
        log = self._claimed(epoch)
        return await (await self._host.on_device(lambda: log.wake(tags), epoch))

    def fence(self, epoch: int) -> None:
        """A new claim: what an older one prepares is ended. What waits goes on waiting."""
        preparing = self._preparing
        if preparing is not None and preparing.epoch < epoch:
            preparing.cancel(StaleEpoch(f"epoch {epoch} has claimed the worker since"))

    def drain(self) -> None:
        """Ends what is being prepared: nobody will commit it."""
        if self._preparing is not None:
            self._preparing.cancel(WorkerDraining("the worker drains"))

    async def close(self) -> None:
        """Drains, and waits until nothing runs any more."""
        self.drain()
        if self._preparing is not None:
            await self._preparing.over()
        self._thread.close()

    def _claimed(self, epoch: int) -> StepLog:
        """The device's log. Raises StaleEpoch, or that the worker does not serve."""
        log = self._host.log
        self._host.require_claim(epoch)
        return log

    async def _exchange(self, log: StepLog, epoch: int, prepared: Prepared) -> CommittedWeights:
        try:
            committed = await (
                await self._host.on_device(lambda: log.commit_weights(prepared), epoch)
            )
        except (UpdateInvalid, MemoryLacking):  # in place, and the old weights are back
            self._metrics.update_ended(UpdateOutcome.FAILED)
            await self._discard(prepared)
            raise
        self._prepared = None
        self._metrics.update_ended(UpdateOutcome.COMMITTED, committed.paused_seconds)
        self._thread.run(prepared.drop)  # the weights before it; the answer need not wait for that
        return committed

    async def _discard(self, prepared: Prepared) -> None:
        """Drops what will not be committed."""
        self._prepared = None
        await self._thread.run(prepared.drop)

    def _ended(self, preparing: Preparing) -> None:
        task, self._preparing = preparing.task, None
        if not task.cancelled() and task.exception() is None:
            self._prepared = task.result()

    def _require_free(self) -> None:
        """Raises UpdateConflict while an update is prepared or waits."""
        if self._preparing is not None:
            raise self._conflict("another update is being prepared")
        if self._prepared is not None:
            raise self._conflict("another update waits for its commit")

    def _conflict(self, message: str) -> UpdateConflict:
        """The error, with the name of the update that is there."""
        current = "" if self._preparing is None else self._preparing.update_id
        if self._prepared is not None:
            current = self._prepared.facts.update_id
        return UpdateConflict(message, current)
