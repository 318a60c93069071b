"""One replica: the loop that runs a core against its worker.

Each turn of the loop: take results, update the core, deliver the tokens, schedule, send. Async
scheduling is the same loop with one more plan in flight. When the worker is lost, the loop claims
it again under a larger epoch and the core adds every sequence again: clients see a pause.
A replica knows sequences, not requests and not clients, and no transport: gRPC and sockets stay
behind the Worker port.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Coroutine
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol, TypeVar

from control_plane.core import invariants
from control_plane.core.claim import (
    Claim,
    ClaimPolicy,
    ClaimState,
    EndKind,
    Jitter,
    Loudness,
    Verdict,
)
from control_plane.core.errors import ResultMismatch
from control_plane.core.events import Finish, FinishReason, SequenceOutput, Stats
from control_plane.core.placement import Load
from control_plane.core.plan import StepPlan, StepResult
from control_plane.core.request import OutputKind, Request, SequenceId, StopScanner
from control_plane.core.scheduler import Scheduler
from control_plane.shell.claim_ends import ClaimError, end_guilty, end_of, log_end
from control_plane.shell.engine import EngineLost, ServedModel, VocabularyMismatch
from control_plane.shell.heartbeat import Heartbeat
from control_plane.shell.limits import (
    Capacity,
    ClampLog,
    SchedulingSettings,
    capacity_of,
    clamps,
    scheduler_config,
)
from control_plane.shell.patience import in_patience
from control_plane.shell.ports import (
    HELD_SAMPLING,
    Attachment,
    Clock,
    Metrics,
    Worker,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.step_lines import log_plan, log_result
from control_plane.shell.successor import (
    FAILURES,
    ArithmeticChange,
    FailureKind,
    successor_of,
    unfit,
)
from twinplane.process.logs import fields

T = TypeVar("T")

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """How a replica schedules and how it behaves towards its worker.

    `arithmetic_change`: what becomes of generations with tokens when their worker comes back with
    the same weights and rounds otherwise. `check_invariants`: audit the core whenever it is idle
    (tests).
    """

    scheduling: SchedulingSettings = field(default_factory=SchedulingSettings)
    claim: ClaimPolicy = field(default_factory=ClaimPolicy)
    arithmetic_change: ArithmeticChange = ArithmeticChange.END
    check_invariants: bool = False


class ReplicaListener(Protocol):
    """Whom a replica tells what has happened to it and to its sequences."""

    def deliver(self, outputs: list[SequenceOutput], now: float) -> None:
        """These sequences got tokens, or ended."""
        ...

    def fail(
        self,
        replica: Replica,
        why: str,
        *,
        only: Collection[SequenceId] | None = None,
        kind: FailureKind = EngineLost,
    ) -> None:
        """The replica can't go on with its sequences, or with some of them.

        All of them are finished, with FAULT, before this returns.
        """
        ...

    def changed(self, replica: Replica) -> None:
        """Its worker was attached or lost."""
        ...


class Replica:
    """The core and the worker of one replica. `number` names it among the fleet's.

    `run` is one task, owned by the fleet; everything else returns at once and runs on the same
    loop.
    """

    def __init__(
        self,
        number: int,
        worker: Worker,
        settings: ReplicaSettings,
        *,
        clock: Clock,
        jitter: Jitter,
        metrics: Metrics,
        listener: ReplicaListener,
    ) -> None:
        self.number = number
        self._worker = worker
        self._settings = settings
        self._clock = clock
        self._metrics = metrics.replica(number, self.stats)
        self._listener = listener
        self._claim = Claim(settings.claim, jitter)
        self._heartbeat = Heartbeat(worker, settings.claim.silence_limit)
        self._core: Scheduler | None = None
        self._model: ServedModel | None = None
        self.attachment: Attachment | None = None
        """The last one: that of now, or the one that was lost."""
        self.capacity: Capacity | None = None
        """What that one can hold."""
        self._only_disconnected = False
        """Nothing but the connection ended the last claim."""
        self._inbox: deque[StepResult | Exception] = deque()
        self._wake = asyncio.Event()
        self._planning_seconds = 0.0
        self._clamps = ClampLog(number)

    @property
    def attached(self) -> bool:
        """Whether its worker is there."""
        return self._claim.is_attached

    @property
    def lost_seconds(self) -> float:
        """For how long its worker has been lost; 0 when it is not."""
        return self._claim.lost_seconds(self._clock())

    def model(self) -> ServedModel | None:
        """The worker's model; None before the first claim and once the worker is gone."""
        return self._model if self._can_queue() else None

    def load(self) -> Load | None:
        """How full it is; None while it can't take sequences."""
        if self._core is None or not self._can_queue():
            return None
        stats = self._core.stats()
        free = stats.kv_free_tokens + stats.kv_cached_tokens
        retry_after = self._core.retry_after(self._clock())
        return Load(self.number, self.attached, stats.waiting, free, self._core.room, retry_after)

    def stats(self) -> Stats | None:
        """The core's own counts; None before the first claim."""
        if self._core is None:
            return None
        stats = self._core.stats()
        return stats if self.attached else stats.without_worker()

    def add(self, sequence_id: SequenceId, request: Request, scanner: StopScanner | None) -> None:
        """Queues a sequence. Raises QueueFull, RequestTooLong or an EngineError."""
        if self._core is None or self._model is None or not self._can_queue():
            raise EngineLost("no worker is attached")
        assert self.attachment is not None
        if max(request.prompt_token_ids) >= self._model.vocabulary_size:
            # The worker would refuse the whole step.
            raise VocabularyMismatch("the worker's model does not know all tokens of this prompt")
        if request.output is OutputKind.HOLD and HELD_SAMPLING not in self.attachment.info.features:
            raise EngineLost("the worker can't hold a row until its mask is known")
        self._core.add(sequence_id, request, scanner)
        self._wake.set()

    def finish(self, sequence_id: SequenceId, reason: FinishReason) -> Finish:
        """Ends a sequence that runs or waits here, and frees what it holds."""
        finish = self._scheduler().finish(sequence_id, reason)
        assert finish is not None, "finished twice, or not a sequence of this replica"
        self._wake.set()
        return finish

    async def run(self) -> None:
        """Claims the worker and executes steps, until cancelled. Raises what is a bug of ours."""
        try:
            while True:
                try:
                    await self._attach()
                    await self._execute()
                except (WorkerLost, WorkerRefused, WorkerUnusable, ResultMismatch) as error:
                    verdict = self._end_claim(error)
                    await self._worker.detach()
                await self._in_patience(asyncio.sleep(verdict.retry_after))
        finally:
            await self._worker.detach()

    # --- the loop -----------------------------------------------------------------------------

    async def _execute(self) -> None:
        reader = asyncio.create_task(self._read_results())
        try:
            await self._heartbeat.watched(self._run_steps())
        finally:
            reader.cancel()
            await asyncio.wait([reader])

    async def _run_steps(self) -> None:
        while True:
            await self._send_messages()
            await self._wake.wait()
            self._wake.clear()
            self._take_results()

    async def _read_results(self) -> None:
        """Puts results, and what ended them, into the inbox; what is in flight bounds it."""
        try:
            while True:
                self._inbox.append(await self._worker.receive())
                self._heartbeat.heard()
                self._wake.set()
        except Exception as error:  # raised again by the loop, which knows what it means
            self._inbox.append(error)
            self._wake.set()

    async def _send_messages(self) -> None:
        core = self._scheduler()
        while True:
            started = self._clock()
            message = core.next_message(started)
            self._planning_seconds += self._clock() - started
            if message is None:
                break
            if isinstance(message, StepPlan) and message.scheduled.rows:
                self._metrics.step_planned(sum(message.scheduled.token_counts))
                if _logger.isEnabledFor(logging.DEBUG):
                    log_plan(self.number, message, core.stats())
            await self._worker.send(message)
        if self._settings.check_invariants and not core.has_work:
            invariants.check(core)

    def _take_results(self) -> None:
        while self._inbox:
            event = self._inbox.popleft()
            if isinstance(event, Exception):
                raise event
            now = self._clock()
            outputs = self._scheduler().update(event)
            self._listener.deliver(outputs, now)
            control_seconds = self._planning_seconds + self._clock() - now
            self._planning_seconds = 0.0
            self._metrics.step_finished(event.executed_seconds, control_seconds)
            if _logger.isEnabledFor(logging.DEBUG):
                log_result(self.number, event, outputs, control_seconds)

    # --- the claim ----------------------------------------------------------------------------

    async def _attach(self) -> None:
        attachment = await self._in_patience(self._worker.attach())
        resumed = self._core is not None
        kv_kept = self._adopt(attachment)
        assert self.capacity is not None
        self._inbox.clear()
        self._claim.attached(self._clock())
        info = attachment.info
        self._metrics.worker_attached(
            worker_id=info.worker_id,
            model=info.model_name,
            device=info.device,
            resumed=resumed,
            kv_kept=kv_kept,
        )
        _logger.info(
            "worker attached",
            extra=fields(
                replica=self.number,
                worker_id=info.worker_id,
                incarnation_id=info.incarnation_id,
                epoch=info.epoch,
                model=info.model_name,
                device=info.device,
                weight_version=info.weight_version.digest[:12],
                sequence_count=_sequence_count(self.stats()),
                kv_kept=kv_kept,
                **asdict(self.capacity),
            ),
        )
        self._listener.changed(self)

    def _adopt(self, attachment: Attachment) -> bool:
        """Makes the core speak to this life of the worker; what can't go on there ends.

        Returns whether the KV of the claim before was kept.
        """
        info = attachment.info
        config = scheduler_config(self._settings.scheduling, info, attachment.pool)
        self._clamps.tell(clamps(self._settings.scheduling, config))
        before, last = self._model, self.attachment
        self.attachment, self.capacity = attachment, capacity_of(config)
        self._model = ServedModel(
            name=info.model_name,
            max_sequence_token_count=config.max_sequence_token_count,
            vocabulary_size=info.vocabulary_size,
            weight_version=info.weight_version,
        )
        if self._core is None or before is None or last is None:
            self._core = Scheduler(config, info.epoch, info.weight_version)
            return False
        successor = successor_of(config, info, last.info, self._settings.arithmetic_change)
        for obstacle, ids in unfit(self._core, successor, self.number):
            kind = FAILURES.get(obstacle, EngineLost)
            self._listener.fail(self, obstacle.value, only=ids, kind=kind)
        kv_kept = self._only_disconnected and attachment.has_kv_of(last)
        outputs = self._core.resync(
            config,
            info.epoch,
            info.weight_version,
            keep_kv=kv_kept,
            arithmetic_changed=info.arithmetic != last.info.arithmetic,
        )
        self._listener.deliver(outputs, self._clock())
        return kv_kept

    def _end_claim(self, error: ClaimError) -> Verdict:
        """Notes that the claim, or an attempt to make one, is over."""
        was_attached = self._claim.is_attached
        end = end_of(error)
        verdict = self._claim.ended(end, self._clock())
        if was_attached:
            self._only_disconnected = end.kind is EndKind.UNREACHABLE
            self._metrics.worker_lost()
            self._listener.changed(self)
        if verdict.loudness is not Loudness.SILENT:
            log_end(end, error, verdict, self.number, _sequence_count(self.stats()))
        if verdict.accuses_inflight:
            most = self._settings.claim.max_failed_claims
            judgement = end_guilty(self._scheduler(), error, most, self.number)
            self._listener.deliver(judgement.convicted, self._clock())
            if judgement.worker_is_broken:
                self._listener.fail(self, "the worker fails on every request")
        return verdict

    async def _in_patience(self, waiting: Coroutine[Any, Any, T]) -> T:
        """The outcome of `waiting`. Sequences whose patience ends meanwhile fail then."""

        def give_up() -> None:
            if sequence_count := _sequence_count(self.stats()):
                _logger.warning(
                    "requests given up: the worker stays away",
                    extra=fields(
                        replica=self.number,
                        sequence_count=sequence_count,
                        lost_seconds=round(self.lost_seconds, 1),
                    ),
                )
            self._listener.fail(self, "the worker is gone")

        return await in_patience(waiting, self._claim.patience_left(self._clock()), give_up)

    def _can_queue(self) -> bool:
        """Whether a worker is there, or was until shortly ago."""
        state = self._claim.state(self._clock())
        return state in (ClaimState.ATTACHED, ClaimState.LOST)

    def _scheduler(self) -> Scheduler:
        assert self._core is not None
        return self._core


def _sequence_count(stats: Stats | None) -> int:
    return 0 if stats is None else stats.running + stats.waiting
