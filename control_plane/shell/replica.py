"""One replica: a core and its claim on a worker.

When the worker is lost, it is claimed again under a larger epoch and the core adds every sequence
again: clients see a pause. What another replica can take does not wait for that; the fleet moves
it. A replica knows sequences, not requests and not clients, and no transport: gRPC and sockets stay
behind the Worker port. The steps of a claim are pipeline.py's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from control_plane.core.claim import (
    DISCONNECTING,
    Claim,
    ClaimEnd,
    ClaimPolicy,
    ClaimState,
    EndKind,
    Jitter,
    Loudness,
    Verdict,
)
from control_plane.core.errors import ResultMismatch
from control_plane.core.events import Finish, FinishReason, Stats
from control_plane.core.fleet import Member, MemberState
from control_plane.core.request import Request, SequenceId, StopScanner
from control_plane.core.scheduler import Scheduler
from control_plane.core.succession import obstacles
from control_plane.shell.adapter_registry import AdapterRegistry
from control_plane.shell.claim_ends import ClaimError, end_guilty, end_of, log_end
from control_plane.shell.engine import EngineLost, ServedModel
from control_plane.shell.heartbeat import Heartbeat
from control_plane.shell.life import Left, Life, member_state
from control_plane.shell.limits import (
    ClampLog,
    SchedulingSettings,
    clamps,
    log_attached,
    scheduler_config,
)
from control_plane.shell.listeners import Register, ReplicaListener
from control_plane.shell.patience import in_patience, tell_given_up
from control_plane.shell.pipeline import Pipeline
from control_plane.shell.ports import (
    Attachment,
    Clock,
    Metrics,
    Worker,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.replica_adapters import ReplicaAdapters
from control_plane.shell.replica_weights import ReplicaWeights
from control_plane.shell.served_weights import ServedWeights
from control_plane.shell.serving import Serving
from control_plane.shell.successor import (
    ArithmeticChange,
    failure_of,
    resumable,
    tell_arithmetic,
    unfit,
)
from twinplane.process.logs import fields

T = TypeVar("T")

_logger = logging.getLogger(__name__)

_QUEUING = (ClaimState.ATTACHED, ClaimState.LEAVING, ClaimState.LOST)
"""A worker is there, or was until shortly ago."""


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
        address: str = "",
        clock: Clock,
        jitter: Jitter,
        metrics: Metrics,
        register: Register,
        listener: ReplicaListener,
        adapters: AdapterRegistry,
        served_weights: ServedWeights | None = None,
    ) -> None:
        self.number = number
        self._settings = settings
        self._clock = clock
        self._metrics = metrics.replica(number, self.stats, lambda: self.state)
        self._register = register
        self._listener = listener
        self._served_weights = served_weights or ServedWeights()
        self._claim = Claim(settings.claim, jitter)
        self._heartbeat = Heartbeat(
            worker, settings.claim.silence_limit, clock, lambda: self.life.looked_at(self.state)
        )
        self._adapters = ReplicaAdapters(
            number, worker, adapters, register, clock, lambda: self._pipeline.wake()
        )
        self._pipeline = Pipeline(
            number,
            worker,
            self._heartbeat,
            deliver=register.deliver,
            took_turn=lambda: listener.took_turn(self),
            worker_leaves=self._worker_leaves,
            exchanged=lambda: listener.changed(self),
            load_adapters=self._adapters.load,
            clock=clock,
            metrics=self._metrics,
            check_invariants=settings.check_invariants,
        )
        self._core: Scheduler | None = None
        self.serving = Serving()
        self.weights = ReplicaWeights(
            self, worker, self._pipeline, self._served_weights, clock, self._metrics
        )
        self.ended_by: EndKind | None = None
        """What ended the last claim."""
        self.is_leaving = self._lets_go = False
        self.life = Life(number, address)
        self.life.note(MemberState.JOINING, "it was listed")
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
        waits = self._claim.state(self._clock()) in _QUEUING
        serves = waits and not self.is_leaving and self.weights.may_answer
        return self.serving.model if serves else None

    @property
    def state(self) -> MemberState:
        """Where it is in its life."""
        if self.is_leaving:
            return MemberState.DRAINING
        return member_state(
            self._claim.state(self._clock()), is_suspicious=self._heartbeat.is_suspicious
        )

    def member(self) -> Member | None:
        """How it looks to the fleet; None before its first worker."""
        traits = self.serving.traits_now(takes_over=self._served_weights.continues)
        if self._core is None or traits is None:
            return None
        is_closed = self.is_leaving or not self.weights.may_answer
        return Member(self.number, self._core, traits, self.state, is_closed, self.weights.is_held)

    def stats(self) -> Stats | None:
        """The core's own counts; None before the first claim."""
        if self._core is None:
            return None
        stats = self._core.stats()
        return stats if self.attached else stats.without_worker()

    def add(self, sequence_id: SequenceId, request: Request, scanner: StopScanner | None) -> None:
        """Queues a sequence. Raises QueueFull, RequestTooLong or an EngineError."""
        serving, model = self.serving, self.model()
        if not self.weights.may_answer:
            raise EngineLost("the worker waits for the weights that are to answer")
        if self._core is None or model is None:
            raise EngineLost("no worker is attached")
        serving.require_fit(request)
        on_change, continues = self._settings.arithmetic_change, self._served_weights.continues
        request = resumable(request, serving.origin, on_change, continues=continues)
        self._core.add(sequence_id, request, scanner)
        self._pipeline.wake()

    def finish(self, sequence_id: SequenceId, reason: FinishReason) -> Finish:
        """Ends a sequence that runs or waits here, and frees what it holds."""
        finish = self._scheduler().finish(sequence_id, reason)
        assert finish is not None, "finished twice, or not a sequence of this replica"
        self._pipeline.wake()
        self._end_if_left()
        return finish

    def give(self, sequence_id: SequenceId, other: Replica) -> None:
        """Moves a sequence to another replica, which can take it. Its token log goes, no KV."""
        traits, others = self.serving.traits, other.serving.traits
        assert traits is not None and others is not None
        crosses = traits.arithmetic != others.arithmetic
        sequence = self._scheduler().withdraw(sequence_id)
        other._scheduler().adopt(sequence, arithmetic_changed=crosses)
        self._pipeline.wake()
        self._end_if_left()
        other._pipeline.wake()

    def leave(self) -> None:
        """Takes nothing more, and ends `run` once it has no sequence left. Idempotent."""
        self.is_leaving = True
        self.life.note(self.state, "it is no longer listed")
        self._pipeline.wake()
        self._end_if_left()

    async def run(self) -> None:
        """Claims the worker and executes steps, until it has left or is cancelled.

        Raises what is a bug of ours.
        """
        try:
            while self._goes_on():
                try:
                    await self._attach()
                    run = self._pipeline.run(self._scheduler(), self._goes_on)
                    await self.life.during(run)
                    verdict = self._end_claim(None)
                except Left:
                    break
                except (WorkerLost, WorkerRefused, WorkerUnusable, ResultMismatch) as error:
                    verdict = self._end_claim(error)
                await self._adapters.detach()
                if self._goes_on():
                    with suppress(Left):
                        await self._in_patience(asyncio.sleep(verdict.retry_after))
        finally:
            await self._adapters.detach()
        self.life.note(MemberState.GONE, "it has left")

    # --- the claim ----------------------------------------------------------------------------

    async def _attach(self) -> None:
        admit = partial(self._listener.admit, self)
        try:
            attachment = await self._in_patience(self._adapters.attach(admit))
            resumed, last = self._core is not None, self.serving.attachment
            kv_kept = self._adopt(attachment)
        finally:
            self.life.claiming = ""
        assert self.serving.capacity is not None
        self._claim.attached(self._clock())
        self.weights.attached()
        info = attachment.info
        same_life = last is not None and last.info.incarnation_id == info.incarnation_id
        self._heartbeat.attached(same_life=same_life, stage_count=info.ranks.pipeline[1])
        self.life.worker_id, self.life.is_replaced = info.worker_id, False
        self.life.note(self.state, "its worker was claimed")
        self._metrics.worker_attached(
            worker_id=info.worker_id,
            model=info.model_name,
            device=info.device,
            resumed=resumed,
            kv_kept=kv_kept,
        )
        count = _sequence_count(self.stats())
        log_attached(self.number, info, self.serving.capacity, count, kv_kept=kv_kept)
        self._listener.changed(self)

    def _adopt(self, attachment: Attachment) -> bool:
        """Makes the core speak to this life of the worker; what can't go on there ends.

        Returns whether the KV of the claim before was kept.
        """
        serving, served = self.serving, self._served_weights
        info = replace(attachment.info, weight_version=served.named(attachment.info.weight_version))
        config = scheduler_config(self._settings.scheduling, info, attachment.pool)
        self._listener.admit(self, info)
        self._clamps.tell(clamps(self._settings.scheduling, config))
        before, last = serving.traits, serving.attachment
        may_answer = served.may_answer(info.weight_version.digest)
        serving.adopt(replace(attachment, info=info), config, may_answer=may_answer)
        after = serving.traits_now(takes_over=served.continues)
        if self._core is None or before is None or last is None or after is None:
            self._core = Scheduler(config, info.epoch, info.weight_version, self._adapters.held)
            serving.kept = self._core.ledger.kept
            return False
        may_cross = tell_arithmetic(last.info, info, self._settings.arithmetic_change)
        found = obstacles(self._core.ledger, before, after, may_cross=may_cross)
        for obstacle, ids in unfit(found, self.number):
            kind = failure_of(obstacle, is_decided=served.is_decided)
            self._register.fail(self, obstacle.value, only=ids, kind=kind)
        kv_kept = self.ended_by in DISCONNECTING and attachment.has_kv_of(last)
        outputs = self._core.resync(
            config,
            info.epoch,
            info.weight_version,
            keep_kv=kv_kept,
            arithmetic_changed=info.arithmetic != last.info.arithmetic,
            adapters=self._adapters.held,
        )
        self._register.deliver(outputs, self._clock())
        return kv_kept

    def _worker_leaves(self) -> None:
        """The worker was told to end: it goes on for those whom nobody else can take."""
        if not self._claim.is_leaving:
            self._claim.leaves()
            self.life.note(self.state, "its worker was told to stop")
            _logger.info("the worker leaves", extra=fields(replica=self.number))
            self._listener.evacuate(self)
            self._lets_go = self._listener.has_others(self)

    def _end_claim(self, error: ClaimError | None) -> Verdict:
        """Notes that the claim, or an attempt to make one, is over. None: its worker was let go."""
        was_attached = self._claim.is_attached
        end = ClaimEnd(EndKind.DRAINING, "it has nothing left to do")
        if error is not None:
            end = end_of(error)
        verdict = self._claim.ended(end, self._clock())
        self.life.note(self.state, end.cause)
        if was_attached:
            self.ended_by = end.kind
            self.weights.lost()
            self._metrics.worker_lost(None if error is None else end.kind.value)
            self._listener.changed(self)
        if error is None:
            _logger.info("worker let go", extra=fields(replica=self.number))
            return verdict
        if verdict.loudness is not Loudness.SILENT:
            log_end(end, error, verdict, self.number, _sequence_count(self.stats()))
        if verdict.accuses_inflight:
            most = self._settings.claim.max_failed_claims
            others = self._listener.has_others(self)
            judgement = end_guilty(self._scheduler(), error, most, self.number, has_others=others)
            self._register.deliver(judgement.convicted, self._clock())
            if judgement.has_appeals or judgement.worker_is_broken:
                self._listener.evacuate(self)
            if judgement.worker_is_broken:
                self._register.fail(self, "the worker fails on every request")
        return verdict

    async def _in_patience(self, waiting: Coroutine[Any, Any, T]) -> T:
        """The outcome of `waiting`. Sequences whose patience ends meanwhile fail then."""

        def give_up() -> None:
            self.life.note(self.state, self.life.reason)
            self._listener.evacuate(self)
            tell_given_up(self.number, _sequence_count(self.stats()), self.lost_seconds)
            self._register.fail(self, "the worker is gone")

        left = self._claim.patience_left(self._clock())
        try:
            return await self.life.during(in_patience(waiting, left, give_up))
        finally:
            waiting.close()  # it may have ended before its task began

    def _goes_on(self) -> bool:
        """Whether there is anything to do, now or later."""
        if not (self.is_leaving or (self._claim.is_leaving and self._lets_go)):
            return True
        # What a lost worker still had to be told is nobody's work.
        has_work = self.attached and self._scheduler().has_work
        return has_work or _sequence_count(self.stats()) > 0

    def _end_if_left(self) -> None:
        """Once it has left, it waits for no worker."""
        if not self._goes_on() and not self.attached:
            self.life.end_wait(Left())

    def _scheduler(self) -> Scheduler:
        assert self._core is not None
        return self._core


def _sequence_count(stats: Stats | None) -> int:
    return 0 if stats is None else stats.running + stats.waiting
