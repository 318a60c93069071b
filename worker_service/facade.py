"""What every transport talks to: the sole owner of the runner and of the thread that it runs on.

Everything here runs on the event loop, and nothing here blocks it. StepLog keeps order and
idempotency, on the device thread. gRPC is one transport; tests and benchmarks call the facade
directly.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

from twinplane.bounds import MAX_EPOCH
from twinplane.process.logs import fields
from worker_service.device_thread import DeviceThread
from worker_service.domain.capability import Capability, MemoryPool
from worker_service.domain.errors import (
    ContractMismatch,
    PlanInvalid,
    StaleEpoch,
    StepGap,
    WorkerDraining,
    WorkerError,
)
from worker_service.domain.plan import (
    CONTRACT_VERSION,
    SamplePlan,
    StepPlan,
    StepResult,
)
from worker_service.domain.rendezvous import Rendezvous
from worker_service.domain.weights import PreparedWeights
from worker_service.lifecycle import Lifecycle, LifecycleState
from worker_service.runner.interface import Ranked, Runner
from worker_service.step_log import LoggedStep, StepLog
from worker_service.weight_updates import UpdateMetrics, WeightUpdates

T = TypeVar("T")

_logger = logging.getLogger(__name__)
_SHOWN_ID_LENGTH = 64


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's capability, its identity, the epoch of the claim that holds it (0: none), and the
    weights that wait for their commit."""

    capability: Capability
    worker_id: str
    incarnation_id: str
    epoch: int
    prepared: PreparedWeights | None = None


@dataclass(slots=True, eq=False)
class Pipeline:
    """Messages of one sender in order: once one is refused, none after it is executed.

    `refused` is set by the device thread when it refuses a message: later ones fail. `ended` is set
    by the event loop when it refuses to queue one: messages that are queued already still run.
    """

    refused: bool = False
    ended: bool = False


class StepMetrics(Protocol):
    """Who counts a worker's steps. Told on the event loop; never raises."""

    def step_finished(self, plan: StepPlan | SamplePlan, result: StepResult) -> None:
        """A step was executed."""
        ...

    def step_failed(self) -> None:
        """A step was refused, or the device failed on it."""
        ...


@dataclass(slots=True, eq=False)
class _Loaded:
    """What exists once the runner is built. `room` bounds how much work waits for the device."""

    log: StepLog
    room: asyncio.Semaphore


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a claim: the worker, the contract version to speak, and the epoch of the claim
    before it (0: there was none)."""

    worker_info: WorkerInfo
    contract_version: int
    previous_epoch: int


class WorkerFacade:
    """One worker. Made and used on one event loop.

    `build` makes the runner; it is called on the device thread, by `load`. `clock` gives seconds.
    `metrics` is told of each step, `update_metrics` of other weights, which `updates` takes.
    Until the runner is built, and from `drain` on, every method but `close` raises
    WorkerUnavailable.
    """

    def __init__(
        self,
        build: Callable[[], Runner],
        *,
        worker_id: str,
        incarnation_id: str,
        clock: Callable[[], float] = time.monotonic,
        metrics: StepMetrics | None = None,
        update_metrics: UpdateMetrics | None = None,
    ) -> None:
        self.lifecycle = Lifecycle()
        self.updates = WeightUpdates(self, clock=clock, metrics=update_metrics)
        self._build = build
        self._worker_id = worker_id
        self._incarnation_id = incarnation_id
        self._clock = clock
        self._metrics = metrics
        self._device = DeviceThread()
        self._loaded: _Loaded | None = None
        self._claimed_epoch = 0
        self._controller_id: str | None = None

    async def load(self) -> None:
        """Builds the runner. Raises what the build raises; the worker is BROKEN then."""
        try:
            runner = await self._device.start(self._build)
        except Exception:
            self.lifecycle.move(LifecycleState.BROKEN)
            raise
        limits = runner.capability().limits
        self._loaded = _Loaded(
            StepLog(runner, self._clock), asyncio.Semaphore(limits.max_inflight_step_count)
        )
        if self.lifecycle.can_move(LifecycleState.ACTIVE):  # otherwise it drains already
            self.lifecycle.move(LifecycleState.ACTIVE)

    async def attach(
        self,
        epoch: int,
        controller_id: str,
        minimum_version: int,
        maximum_version: int,
        rendezvous: Rendezvous | None = None,
    ) -> Claim:
        """Claims the worker.

        Older epochs are fenced at once, and with them their plans that still wait for the device.
        This returns when the running step is over and the batch is cleared. One of several ranks
        then begins to meet the others at `rendezvous`, which it has to be given; what needs the
        device waits behind that. Raises StaleEpoch (also when a newer claim overtakes this one),
        ContractMismatch, PlanInvalid or RunnerFailed.
        """
        log = self._require_loaded().log
        self._require_claimable_by(controller_id)
        version = _shared_version(minimum_version, maximum_version)
        if epoch > MAX_EPOCH:
            raise PlanInvalid("epoch", f"must be at most {MAX_EPOCH}: another has to follow")
        if epoch <= self._claimed_epoch:
            raise StaleEpoch(f"epoch {epoch} is not above the current, {self._claimed_epoch}")
        previous, self._claimed_epoch = self._claimed_epoch, epoch
        self._controller_id = controller_id
        _logger.info("claimed", extra=fields(epoch=epoch, controller_id=controller_id))
        self.updates.fence(epoch)

        if rendezvous is not None and isinstance(log.runner, Ranked):
            log.runner.abandon(epoch)  # or a wait for a lost rank would hold up this claim

        def begin() -> None:
            self.require_claim(epoch)
            log.begin(epoch)

        await (await self.on_device(begin))
        self.require_claim(epoch)
        if rendezvous is not None:
            await self.on_device(partial(log.join, rendezvous))
            self.require_claim(epoch)
        return Claim(self.worker_info(), version, previous)

    async def submit(
        self, plan: StepPlan, pipeline: Pipeline | None = None
    ) -> asyncio.Future[StepResult]:
        """Queues a plan behind those submitted before it; waits only for room in the queue.

        The future, like this method, raises Precondition, PlanInvalid, WorkerUnavailable or
        RunnerFailed. Cancelling it leaves the plan in the queue.
        """
        arrived = self._clock()
        return await self._enqueue_step(plan, pipeline, lambda log: log.launch(plan, arrived))

    async def submit_sample(
        self, plan: SamplePlan, pipeline: Pipeline | None = None
    ) -> asyncio.Future[StepResult]:
        """Queues the sampling of held rows, as `submit` queues a plan."""
        arrived = self._clock()
        return await self._enqueue_step(
            plan, pipeline, lambda log: log.launch_sample(plan, arrived)
        )

    def worker_info(self) -> WorkerInfo:
        """What the worker is and which claim holds it."""
        capability = self._require_loaded().log.runner.capability()
        return WorkerInfo(
            capability,
            self._worker_id,
            self._incarnation_id,
            self._claimed_epoch,
            self.updates.prepared,
        )

    @property
    def log(self) -> StepLog:
        """See weight_updates.Host."""
        return self._require_loaded().log

    @property
    def broken_by(self) -> str:
        """Why no step can ever run again; empty while one can, or before the runner is built."""
        return "" if self._loaded is None else self._loaded.log.broken_by

    async def memory_pool(self) -> MemoryPool:
        """The KV pool as it is between two steps. Raises GroupLost, too."""
        log = self._require_loaded().log
        return await (await self.on_device(log.memory_pool))

    def finish(self) -> None:
        """Takes no claim but of the controller that has it now, which goes on. Idempotent."""
        if self.lifecycle.can_move(LifecycleState.FINISHING):
            self.lifecycle.move(LifecycleState.FINISHING)

    def drain(self) -> None:
        """Accepts no more work. What is queued is still executed. Idempotent."""
        if self.lifecycle.can_move(LifecycleState.DRAINING):
            self.lifecycle.move(LifecycleState.DRAINING)
        self.updates.drain()

    async def close(self) -> None:
        """Drains, waits for what is queued, and ends the device thread. Idempotent.

        A rank then leaves its group, which must not be open when the process ends.
        """
        self.drain()
        await self.updates.close()
        runner = None if self._loaded is None else self._loaded.log.runner
        if runner is not None and runner.capability().ranks.size > 1:
            await self._device.close(runner.reset)
        else:
            await self._device.close()

    def hurry(self) -> None:
        """Waits for no other rank any more: what is queued fails where it would."""
        if self._loaded is not None and isinstance(self._loaded.log.runner, Ranked):
            self._loaded.log.runner.abandon(MAX_EPOCH + 1)

    def _require_loaded(self) -> _Loaded:
        self.lifecycle.require_serving()
        if self._loaded is None:  # it was told to end while it was loading
            raise WorkerDraining("the worker drains")
        return self._loaded

    def _require_claimable_by(self, controller_id: str) -> None:
        """A worker that finishes what runs does so for the controller that runs it, which may
        claim it again. Raises WorkerDraining for another one.
        """
        is_finishing = self.lifecycle.state is LifecycleState.FINISHING
        if is_finishing and controller_id != self._controller_id:
            raise WorkerDraining("the worker drains")

    def require_claim(self, epoch: int) -> None:
        """See weight_updates.Host."""
        if epoch != self._claimed_epoch:
            raise StaleEpoch(
                f"epoch {epoch} does not hold the claim; the current is {self._claimed_epoch}, "
                f"of {named(self._controller_id or '')}"
            )

    async def _enqueue_step(
        self,
        plan: StepPlan | SamplePlan,
        pipeline: Pipeline | None,
        launch: Callable[[StepLog], LoggedStep],
    ) -> asyncio.Future[StepResult]:
        pipeline = Pipeline() if pipeline is None else pipeline

        def work() -> LoggedStep:
            _require_open(pipeline.refused)
            try:
                self.require_claim(plan.epoch)  # again: it may have changed while this waited
                return launch(log)
            except WorkerError as error:
                pipeline.refused = True
                error.step_id = plan.step_id
                raise

        _require_open(pipeline.ended)
        try:
            log = self._require_loaded().log
            self.require_claim(plan.epoch)
            loaded = await self._acquire_room()
        except WorkerError:
            pipeline.ended = True
            raise
        future = self._device.start_pending(work, finished=lambda: self._settle(loaded))
        if (metrics := self._metrics) is not None:
            future.add_done_callback(lambda done: _count(metrics, plan, done))
        return future

    async def on_device(self, work: Callable[[], T], epoch: int | None = None) -> asyncio.Future[T]:
        """See weight_updates.Host."""

        def fenced() -> T:
            if epoch is not None:
                self.require_claim(epoch)  # it may have changed while this waited
            return work()

        loaded = await self._acquire_room()
        return self._device.start(fenced, finished=lambda: self._settle(loaded))

    async def _acquire_room(self) -> _Loaded:
        """Waits for room in the queue. The worker may have begun to drain meanwhile."""
        loaded = self._require_loaded()
        await loaded.room.acquire()
        try:
            self.lifecycle.require_serving()
        except WorkerError:
            loaded.room.release()
            raise
        return loaded

    def _settle(self, loaded: _Loaded) -> None:
        """After each piece of work: makes room, and lets the lifecycle follow the log."""
        loaded.room.release()
        if loaded.log.broken_by:
            state = LifecycleState.BROKEN
        elif loaded.log.failed:
            state = LifecycleState.FAILED
        else:
            state = LifecycleState.ACTIVE
        if self.lifecycle.can_move(state):
            self.lifecycle.move(state)


def _count(
    metrics: StepMetrics, plan: StepPlan | SamplePlan, done: asyncio.Future[StepResult]
) -> None:
    if done.cancelled():
        return  # it still runs, and nobody waits for what comes of it
    if done.exception() is None:
        metrics.step_finished(plan, done.result())
    else:
        metrics.step_failed()


def named(controller_id: str) -> str:
    """A controller in a sentence. Its id is text that it has chosen, of any length."""
    return f"the controller {controller_id[:_SHOWN_ID_LENGTH]!r}"


def _require_open(ended: bool) -> None:
    if ended:
        raise StepGap("an earlier message of this pipeline was refused")


def _shared_version(minimum: int, maximum: int) -> int:
    if not 1 <= minimum <= maximum:
        raise PlanInvalid("contract_versions", "must be a range of versions from 1 on")
    if not minimum <= CONTRACT_VERSION <= maximum:
        raise ContractMismatch(
            f"the worker speaks contract version {CONTRACT_VERSION}, the controller {minimum} to "
            f"{maximum}"
        )
    return CONTRACT_VERSION
