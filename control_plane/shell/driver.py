"""Runs the core against one worker and its clients.

Each turn of the loop: take results, update the core, hand each stream its tokens, schedule, send.
Async scheduling is the same loop with one more plan in flight. When the worker is lost, the loop
claims it again under a larger epoch and the core sends every sequence whole: clients see a pause.
The driver knows no transport: gRPC and sockets stay behind the Worker port.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from control_plane.core import invariants
from control_plane.core.errors import ResultMismatch
from control_plane.core.events import Finish, FinishReason, Stats
from control_plane.core.plan import StepResult
from control_plane.core.request import Request, RequestId, SequenceId, StopScanner
from control_plane.core.scheduler import Scheduler
from control_plane.observability.metrics import Telemetry
from control_plane.shell.backoff import Backoff
from control_plane.shell.engine import (
    DuplicateRequest,
    EngineDraining,
    EngineError,
    EngineLost,
    ServedModel,
    VocabularyMismatch,
)
from control_plane.shell.limits import SchedulingSettings, scheduler_config
from control_plane.shell.live_requests import LiveRequests
from control_plane.shell.ports import (
    Clock,
    MemoryPool,
    RefusalReason,
    Worker,
    WorkerInfo,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.stream import TokenStream
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_ClaimEnd = WorkerLost | WorkerRefused | WorkerUnusable | ResultMismatch


@dataclass(frozen=True, slots=True)
class DriverSettings:
    """How the driver behaves towards its worker. Times in seconds.

    A loss shorter than `loss_patience` is only a pause; after it requests fail and new ones are
    refused until a worker is back. Until the first claim a worker that loads, or can't be reached
    yet, is asked every `starting_delay`; retries after a loss back off. `contention_delay` is the
    first wait after another controller claimed the worker. A request can kill a worker: after
    `max_fruitless_claims` claims in a row that ended with plans in flight and no result, what runs
    is given up. `check_invariants`: audit the core whenever it is idle (tests).
    """

    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    served_model_name: str | None = None
    loss_patience: float = 60.0
    starting_delay: float = 0.1
    first_retry_delay: float = 0.05
    longest_retry_delay: float = 2.0
    contention_delay: float = 10.0
    longest_contention_delay: float = 120.0
    max_fruitless_claims: int = 5
    check_invariants: bool = False


class Driver:
    """The engine behind the client edge: implements shell.engine.Engine.

    `run` is one task, owned by the composition root; everything else returns at once and runs on
    the same loop. However `run` ends, every stream has ended with it.
    """

    def __init__(
        self,
        worker: Worker,
        settings: DriverSettings,
        *,
        clock: Clock,
        rng: random.Random,
        telemetry: Telemetry,
        on_readiness: Callable[[bool], None],
    ) -> None:
        self._worker = worker
        self._settings = settings
        self._clock = clock
        self._telemetry = telemetry
        self._on_readiness = on_readiness
        self._requests = LiveRequests(telemetry)
        self._core: Scheduler | None = None
        self._model: ServedModel | None = None
        self._vocabulary_size = 0
        self._last_sequence_id = 0
        self._attached_at: float | None = None
        self._lost_at: float | None = None
        self._accepting = True
        self._inbox: deque[StepResult | Exception] = deque()
        self._wake = asyncio.Event()
        self._planning_seconds = 0.0
        self._got_result = False
        self._fruitless_claims = 0
        self._told_reasons: set[str] = set()
        self._retry = Backoff(settings.first_retry_delay, settings.longest_retry_delay, rng)
        self._contention = Backoff(
            settings.contention_delay, settings.longest_contention_delay, rng
        )
        telemetry.follow(self.stats)

    # --- the client edge ----------------------------------------------------------------------

    def served_model(self) -> ServedModel | None:
        """The model that answers; a worker lost only shortly ago still counts."""
        return None if self._is_lost() else self._model

    def submit(
        self, request: Request, stream: TokenStream, scanner: StopScanner | None = None
    ) -> None:
        """Queues a request. Raises QueueFull, DuplicateRequest, RequestTooLong or EngineError."""
        if not self._accepting:
            raise EngineDraining("the server is shutting down")
        if self._core is None or self._is_lost():
            raise EngineLost("no worker is attached")
        if max(request.prompt_token_ids) >= self._vocabulary_size:
            # The worker would refuse the whole step.
            raise VocabularyMismatch("the worker's model does not know all tokens of this prompt")
        if request.request_id in self._requests:
            raise DuplicateRequest(f"request {request.request_id!r} is not finished")
        self._last_sequence_id += 1
        sequence_id = SequenceId(self._last_sequence_id)
        self._core.add(sequence_id, request, scanner)
        self._requests.add(request, sequence_id, stream)
        self._wake.set()

    def finish(self, request_id: RequestId, reason: FinishReason) -> Finish | None:
        """Ends a request and its stream, and frees what it holds; None if it is not running."""
        if request_id not in self._requests:
            return None
        finish = self._finish_in_core(self._requests.sequence_id(request_id), reason)
        self._requests.end(request_id, finish)
        self._wake.set()
        return finish

    @property
    def ready(self) -> bool:
        """Whether a worker is attached and new requests are accepted."""
        return self._attached_at is not None and self._accepting

    # --- the composition root -----------------------------------------------------------------

    async def run(self) -> None:
        """Claims the worker and executes steps, until cancelled.

        Never returns by itself. Raises what is a bug of ours; all streams have failed then.
        """
        try:
            while True:
                try:
                    await self._claim()
                    await self._execute()
                except (WorkerLost, WorkerRefused, WorkerUnusable, ResultMismatch) as error:
                    delay = self._lose(error)
                    await self._worker.detach()
                await self._wait_out(delay)
        finally:
            self._stop_accepting()
            self._fail_all(EngineLost, "the engine has stopped")
            await self._worker.detach()

    async def drain(self, grace: float) -> None:
        """Accepts nothing more, gives what runs `grace` seconds, then fails the rest."""
        self._stop_accepting()
        _logger.info("draining", extra=fields(request_count=len(self._requests)))
        try:
            async with asyncio.timeout(grace):
                await self._requests.wait_empty()
        except TimeoutError:
            _logger.warning(
                "requests outlived the drain", extra=fields(request_count=len(self._requests))
            )
            self._fail_all(EngineDraining, "the server has shut down")

    def stats(self) -> Stats | None:
        """The core's own counts; None before the first claim."""
        return None if self._core is None else self._core.stats()

    # --- a claim, from attach to loss ---------------------------------------------------------

    async def _claim(self) -> None:
        info, pool = await self._worker.attach()
        resumed = self._core is not None
        self._adopt(info, pool)
        self._inbox.clear()
        self._got_result = False
        self._told_reasons.clear()
        self._attached_at = self._clock()
        self._lost_at = None
        self._telemetry.worker_attached(
            worker_id=info.worker_id, model=info.model_name, device=info.device, resumed=resumed
        )
        _logger.info(
            "worker attached",
            extra=fields(
                worker_id=info.worker_id,
                incarnation_id=info.incarnation_id,
                epoch=info.epoch,
                weight_version=info.weight_version.digest[:12],
                request_count=len(self._requests),
            ),
        )
        self._on_readiness(self.ready)

    def _adopt(self, info: WorkerInfo, pool: MemoryPool) -> None:
        """Makes the core speak to this life of the worker; what can't go on there ends."""
        config = scheduler_config(self._settings.scheduling, info, pool)
        known = self._model
        self._vocabulary_size = info.vocabulary_size
        self._model = ServedModel(
            name=self._settings.served_model_name or info.model_name,
            max_sequence_token_count=config.max_sequence_token_count,
            vocabulary_size=info.vocabulary_size,
            weight_version=info.weight_version,
        )
        if self._core is None or known is None:
            self._core = Scheduler(config, info.epoch, info.weight_version)
            return
        if known.vocabulary_size != info.vocabulary_size:
            self._fail_all(EngineLost, "the worker came back with another model")
        elif known.weight_version.digest != info.weight_version.digest:
            mid_stream = self._requests.ids(mid_stream_only=True)
            self._fail(mid_stream, EngineLost, "the worker came back with other weights")
        now = self._clock()
        for output in self._core.resync(config, info.epoch, info.weight_version):
            self._requests.push(output, now)

    async def _execute(self) -> None:
        reader = asyncio.create_task(self._read_results())
        try:
            while True:
                await self._send_plans()
                await self._wake.wait()
                self._wake.clear()
                self._take_results()
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _read_results(self) -> None:
        """Puts results, and what ended them, into the inbox; plans in flight bound it."""
        try:
            while True:
                self._inbox.append(await self._worker.receive())
                self._wake.set()
        except Exception as error:  # raised again by the loop, which knows what it means
            self._inbox.append(error)
            self._wake.set()

    async def _send_plans(self) -> None:
        core = self._scheduler()
        while True:
            started = self._clock()
            plan = core.schedule(started)
            self._planning_seconds += self._clock() - started
            if plan is None:
                break
            await self._worker.send(plan)
        if self._settings.check_invariants and not core.has_work:
            invariants.check(core)

    def _take_results(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, Exception):
                raise event
            self._got_result = True
            self._retry.reset()
            self._deliver(event)

    def _deliver(self, result: StepResult) -> None:
        core = self._scheduler()
        now = self._clock()
        for output in core.update(result):
            self._requests.push(output, now)
        self._telemetry.step_finished(result.executed_seconds)
        self._telemetry.control_work(self._planning_seconds + self._clock() - now)
        self._planning_seconds = 0.0

    # --- loss and end -------------------------------------------------------------------------

    def _lose(self, error: _ClaimEnd) -> float:
        """Notes that the claim is over; returns the seconds to wait before the next."""
        now = self._clock()
        attached = self._attached_at is not None
        contested = _refused_with(error, RefusalReason.STALE_EPOCH)
        if self._attached_at is not None:
            if now - self._attached_at > self._settings.longest_contention_delay:
                self._contention.reset()
            self._attached_at = None
            self._lost_at = now
            self._telemetry.worker_lost()
            self._on_readiness(False)
            if not contested:
                self._judge_claim()
        delay = self._delay_after(error)
        # While there is no worker, each reason is told once, however often it is met.
        reason = error.reason if isinstance(error, WorkerRefused) else str(error)
        if attached or contested or reason not in self._told_reasons:
            self._told_reasons.add(reason)
            _logger.log(
                logging.WARNING if attached or contested else logging.INFO,
                "another controller claimed the worker" if contested else "no worker",
                extra=fields(
                    error=str(error),
                    retry_seconds=round(delay, 3),
                    request_count=len(self._requests),
                ),
            )
        return delay

    def _delay_after(self, error: _ClaimEnd) -> float:
        """Seconds to wait before the next claim."""
        if _refused_with(error, RefusalReason.STALE_EPOCH):
            return self._contention.next()
        starting = isinstance(error, WorkerLost) or _refused_with(
            error, RefusalReason.WORKER_LOADING
        )
        if starting and self._core is None:
            # Clients wait for this worker to come up: whatever is added here, they wait longer.
            return self._settings.starting_delay
        return self._retry.next()

    async def _wait_out(self, delay: float) -> None:
        """Waits before the next claim; requests whose patience ends meanwhile fail then."""
        if self._lost_at is not None:
            patience = self._lost_at + self._settings.loss_patience - self._clock()
            if patience <= delay:
                await asyncio.sleep(patience)
                delay -= max(patience, 0.0)
                self._fail_all(EngineLost, "the worker is gone")
        await asyncio.sleep(delay)

    def _judge_claim(self) -> None:
        """Gives up requests that ended several claims in a row without a single result."""
        core = self._core
        assert core is not None
        if self._got_result or not core.inflight_count:
            self._fruitless_claims = 0
            return
        self._fruitless_claims += 1
        if self._fruitless_claims >= self._settings.max_fruitless_claims:
            self._fruitless_claims = 0
            _logger.error("requests given up: no worker could execute them")
            self._fail_all(EngineLost, "the worker failed several times on this request")

    def _is_lost(self) -> bool:
        """Whether the worker has been gone for longer than anybody should wait."""
        return (
            self._lost_at is not None
            and self._clock() - self._lost_at >= self._settings.loss_patience
        )

    def _stop_accepting(self) -> None:
        self._accepting = False
        self._on_readiness(False)

    def _fail_all(self, kind: type[EngineError], message: str) -> None:
        self._fail(self._requests.ids(), kind, message)

    def _fail(self, request_ids: list[RequestId], kind: type[EngineError], message: str) -> None:
        for request_id in request_ids:
            sequence_id = self._requests.sequence_id(request_id)
            self._requests.fail(request_id, kind(message))
            self._finish_in_core(sequence_id, FinishReason.FAULT)
        self._wake.set()

    def _finish_in_core(self, sequence_id: SequenceId, reason: FinishReason) -> Finish:
        finish = self._scheduler().finish(sequence_id, reason)
        assert finish is not None, "a live stream without its request in the core"
        return finish

    def _scheduler(self) -> Scheduler:
        assert self._core is not None
        return self._core


def _refused_with(error: _ClaimEnd, reason: RefusalReason) -> bool:
    return isinstance(error, WorkerRefused) and error.reason is reason
