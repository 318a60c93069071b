"""The step contract's bookkeeping around a runner: order and idempotency.

It is used on the device thread; only what says so is safe from others. A refusal leaves the log and
the runner unchanged. The runner, not the log, knows which rows are held.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from twinplane.process.logs import fields
from worker_service.device_errors import is_device_lost, is_out_of_memory, one_line
from worker_service.domain.capability import MemoryPool
from worker_service.domain.errors import (
    Asleep,
    GroupLost,
    PlanInvalid,
    RowNotHeld,
    RunnerFailed,
    StaleEpoch,
    StepConflict,
    StepGap,
    StepResultGone,
    WeightVersionMismatch,
    WorkerError,
)
from worker_service.domain.plan import SamplePlan, StepPlan, StepResult
from worker_service.domain.rendezvous import Rendezvous
from worker_service.domain.weights import CommittedWeights, SleepTag
from worker_service.runner.interface import (
    PendingStep,
    Prepared,
    Ranked,
    RestoreFailed,
    Runner,
    Sleeper,
    Updatable,
)

KEPT_STEP_COUNT = 8

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class LoggedStep:
    """A launched step: a PendingStep whose result has timings and is kept.

    `arrived` is when the request reached the worker, `launched` is when the device was given the
    step. Both are in the clock's seconds. It may still be pending when another epoch begins.
    """

    def __init__(
        self,
        log: StepLog,
        pending: PendingStep,
        epoch: int,
        step_id: int,
        arrived: float,
        launched: float,
    ) -> None:
        self._log = log
        self._pending = pending
        self._epoch = epoch
        self._step_id = step_id
        self._arrived = arrived
        self._launched = launched
        self._result: StepResult | None = None

    def is_ready(self) -> bool:
        """Whether `result` would return at once."""
        return self._result is not None or self._pending.is_ready()

    def result(self) -> StepResult:
        """The step's result. Raises RunnerFailed or GroupLost when the device failed on it."""
        if self._result is None:
            self._result = self._log.collect(
                self._pending, self._epoch, self._step_id, self._arrived, self._launched
            )
        return self._result


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """An executed step."""

    step_id: int
    fingerprint: Callable[[], bytes]
    logged: LoggedStep


@dataclass(frozen=True, slots=True, eq=False)
class _Sampling:
    """Held rows of a step that were sampled together."""

    step_id: int
    rows: frozenset[int]
    fingerprint: bytes
    logged: LoggedStep


class StepLog:
    """Launches steps on the runner that it owns, one epoch after another.

    `arrived` is when the request reached the worker, in the clock's seconds.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self.runner = runner
        self._clock = clock
        self._epoch = 0
        self._steps: deque[_Step] = deque(maxlen=KEPT_STEP_COUNT)
        self._samplings: deque[_Sampling] = deque(maxlen=KEPT_STEP_COUNT)
        self._next_step_id = 1
        self._last_collected = 0.0
        self._failed = False
        self._lost: GroupLost | None = None
        """Why nothing runs in this epoch, where other ranks are missing."""
        self._broken_by = ""
        self.asleep: frozenset[SleepTag] = frozenset()
        """What the worker does without, until it is woken."""

    @property
    def failed(self) -> bool:
        """Whether nothing runs in this epoch any more: the runner raised an unexpected error, or
        another rank is missing. Safe from any thread."""
        return self._failed

    @property
    def broken_by(self) -> str:
        """Why no step can ever run again; empty while one can. Safe from any thread."""
        return self._broken_by

    def begin(self, epoch: int) -> None:
        """Clears the persistent batch for a new epoch. Raises RunnerFailed when that fails."""
        self._epoch = epoch
        self._steps.clear()
        self._samplings.clear()
        self._next_step_id = 1
        try:
            self.runner.reset()
        except Exception as error:  # as in _guard; without a reset the worker can't go on
            self._failed = True
            self._broken_by = "what it had computed could not be cleared after a failure"
            _logger.exception("reset failed", extra=fields(epoch=epoch))
            raise RunnerFailed(f"reset failed: {type(error).__name__}") from error
        self._failed = False
        self._lost = None

    def join(self, rendezvous: Rendezvous) -> None:
        """Lets the runner meet the other ranks of its replica for this epoch.

        Where they don't meet, everything but `begin` raises GroupLost from then on.
        """
        runner = self.runner
        assert isinstance(runner, Ranked), "one of several ranks that can't meet the others"
        try:
            self._guard(lambda: runner.join(rendezvous), rendezvous.epoch, 0)
        except GroupLost as lost:
            _logger.warning(
                "the ranks did not meet", extra=fields(epoch=self._epoch, error=str(lost))
            )
        except RunnerFailed:
            pass  # it is logged, and the epoch has failed

    def memory_pool(self) -> MemoryPool:
        """The runner's. Raises GroupLost or RunnerFailed in an epoch without its group."""
        if self._lost is not None:
            raise _again(self._lost)
        return self.runner.memory_pool()

    def commit_weights(self, prepared: Prepared) -> CommittedWeights:
        """Makes prepared weights live: plans for others are refused from then on.

        Raises what Updatable.commit_update says, and RunnerFailed where no weights are left.
        """
        runner = self.runner
        assert isinstance(runner, Updatable), "what prepared them can commit them"
        if self.asleep:
            raise _asleep(self.asleep)
        started = self._clock()
        version = self._keep_alive(lambda: runner.commit_update(prepared))
        return CommittedWeights(version, self._clock() - started)

    def sleep(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """Frees memory; returns all that is free then. Steps are refused until it is back.

        Raises PlanMismatch.
        """
        runner = self.runner
        assert isinstance(runner, Sleeper), "a runner that can't sleep"
        self.asleep = runner.sleep(tags)
        return self.asleep

    def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """Takes memory again. Raises MemoryLacking, or RunnerFailed where the weights are gone."""
        runner = self.runner
        assert isinstance(runner, Sleeper), "a runner that can't sleep"
        self.asleep = self._keep_alive(lambda: runner.wake(tags))
        return self.asleep

    def _keep_alive(self, work: Callable[[], T]) -> T:
        """What leaves the worker without weights is its end."""
        try:
            return work()
        except RestoreFailed as error:
            self._failed = True
            self._broken_by = f"its weights are lost: {error}"
            _logger.exception("weights are lost", extra=fields(epoch=self._epoch))
            raise RunnerFailed(self._broken_by) from error

    def launch(self, plan: StepPlan, arrived: float) -> LoggedStep:
        """Launches a plan, or returns the step of one that was launched before.

        Raises any Precondition, PlanInvalid, or RunnerFailed.
        """
        self._require_epoch(plan.epoch)
        if plan.step_id < 1:
            raise PlanInvalid("plan.step_id", "steps count from 1")
        if plan.step_id > self._next_step_id:
            raise StepGap(f"step {plan.step_id} came where {self._next_step_id} is next")
        if plan.step_id < self._next_step_id:
            step = self._kept(plan.step_id)
            if step.fingerprint() != plan.fingerprint():
                raise StepConflict(f"step {plan.step_id} was executed with another plan")
            return step.logged
        self._require_runner()
        self._require_weights(plan)
        launched = self._clock()
        pending = self._guard(lambda: self.runner.launch(plan), plan.epoch, plan.step_id)
        logged = LoggedStep(self, pending, plan.epoch, plan.step_id, arrived, launched)
        self._steps.append(_Step(plan.step_id, plan.fingerprint, logged))
        self._next_step_id += 1
        return logged

    def launch_sample(self, plan: SamplePlan, arrived: float) -> LoggedStep:
        """Launches the sampling of held rows, or returns the step of one that was launched before.

        Raises StaleEpoch, RowNotHeld, StepConflict, PlanInvalid or RunnerFailed.
        """
        self._require_epoch(plan.epoch)
        if not 1 <= plan.step_id < self._next_step_id:
            raise RowNotHeld(f"step {plan.step_id} was not executed")
        rows = frozenset(plan.rows.tolist())
        fingerprint = _fingerprint(plan)
        for sampling in reversed(self._samplings):
            if sampling.step_id != plan.step_id or sampling.rows.isdisjoint(rows):
                continue
            if sampling.fingerprint != fingerprint:
                raise StepConflict(
                    f"rows of step {plan.step_id} were sampled together with others, or with "
                    "other masks"
                )
            return sampling.logged
        self._require_runner()
        launched = self._clock()
        pending = self._guard(lambda: self.runner.launch_sample(plan), plan.epoch, plan.step_id)
        logged = LoggedStep(self, pending, plan.epoch, plan.step_id, arrived, launched)
        self._samplings.append(_Sampling(plan.step_id, rows, fingerprint, logged))
        return logged

    def collect(
        self, pending: PendingStep, epoch: int, step_id: int, arrived: float, launched: float
    ) -> StepResult:
        """Waits for a launched step; returns its result with timings. Raises RunnerFailed or
        GroupLost."""
        result = self._guard(pending.result, epoch, step_id)
        # A step that was launched behind another started on the device when that one was over.
        started = max(launched, self._last_collected)
        self._last_collected = self._clock()
        return replace(
            result,
            queued_seconds=max(0.0, started - arrived),
            executed_seconds=self._last_collected - started,
        )

    def _require_epoch(self, epoch: int) -> None:
        if epoch < 1 or epoch != self._epoch:
            raise StaleEpoch(f"epoch {epoch} does not hold the claim, {self._epoch} does")

    def _require_runner(self) -> None:
        if self._lost is not None:
            raise _again(self._lost)
        if self._failed or self._broken_by:
            raise RunnerFailed("an earlier step of this epoch failed; attach again")
        if self.asleep:
            raise _asleep(self.asleep)

    def _require_weights(self, plan: StepPlan) -> None:
        held = self.runner.capability().weight_version
        if plan.weight_version != held:
            raise WeightVersionMismatch(
                f"the plan is for generation {plan.weight_version.generation} "
                f"({plan.weight_version.digest[:12]}), the worker holds {held.generation} "
                f"({held.digest[:12]})"
            )

    def _kept(self, step_id: int) -> _Step:
        """The record of an executed step. Raises StepResultGone when it is no longer kept."""
        oldest = self._steps[0].step_id
        if step_id < oldest:
            raise StepResultGone(f"step {step_id} is gone; results from {oldest} on are kept")
        return self._steps[step_id - oldest]

    def _guard(self, execute: Callable[[], T], epoch: int, step_id: int) -> T:
        try:
            return execute()
        except GroupLost as lost:
            self._fail(epoch, lost)
            lost.step_id = step_id
            raise
        except WorkerError:
            raise
        except Exception as error:  # any error of a model ends the epoch, not the process
            self._fail(epoch)
            if is_device_lost(error):  # only another process can use it again
                self._broken_by = f"the device failed: {one_line(error)}"
            _logger.exception("step failed", extra=fields(epoch=epoch, step_id=step_id))
            failed = RunnerFailed(f"step {step_id} failed: {_cause(error)}")
            failed.step_id = step_id
            raise failed from error

    def _fail(self, epoch: int, lost: GroupLost | None = None) -> None:
        """No later step of the epoch can run. Where a new one has begun, that goes on."""
        if epoch == self._epoch:
            self._failed, self._lost = True, lost


def _asleep(tags: frozenset[SleepTag]) -> Asleep:
    names = " and ".join(sorted(tag.value for tag in tags))
    return Asleep(f"the worker sleeps, without {names}: wake it first")


def _again(lost: GroupLost) -> GroupLost:
    """The error for another message: whoever raises it writes the step into it."""
    return GroupLost(str(lost))


def _cause(error: Exception) -> str:
    """The error's kind, and what to do where memory ran out. Its text may hold what nobody may
    see."""
    if not is_out_of_memory(error):
        return type(error).__name__
    return (
        f"out of memory ({type(error).__name__}); a worker with less --kv-cache-memory-bytes, "
        "--max-num-batched-tokens or --max-num-seqs needs less"
    )


def _fingerprint(plan: SamplePlan) -> bytes:
    digest = hashlib.blake2b(plan.rows.tobytes(), digest_size=16)
    if plan.masks is not None:
        digest.update(plan.masks.rows.tobytes())
        digest.update(plan.masks.bitmasks.tobytes())
    return digest.digest()
