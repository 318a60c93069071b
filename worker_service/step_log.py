"""The step contract's bookkeeping around a runner: order, idempotency, held steps.

Lives on the device thread and knows no other. Every refusal leaves both the log and the runner as
they were.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from twinplane.process.logs import fields
from worker_service.domain.errors import (
    PlanInvalid,
    RunnerFailed,
    StaleEpoch,
    StepConflict,
    StepGap,
    StepHeld,
    StepNotHeld,
    StepResultGone,
    WeightVersionMismatch,
    WorkerError,
)
from worker_service.domain.plan import GrammarMasks, SamplingMode, StepPlan, StepResult
from worker_service.runner.interface import Runner

KEPT_STEP_COUNT = 8

_logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Step:
    """An executed step. `masks_digest` and `sampled` are set once a held step is sampled."""

    step_id: int
    fingerprint: bytes
    held: bool
    result: StepResult
    masks_digest: bytes | None = None
    sampled: StepResult | None = None


class StepLog:
    """Executes the steps of one epoch after another on the runner it owns.

    `arrived` is when the request reached the worker, in the clock's seconds.
    """

    def __init__(self, runner: Runner, clock: Callable[[], float]) -> None:
        self.runner = runner
        self._clock = clock
        self._epoch = 0
        self._steps: deque[_Step] = deque(maxlen=KEPT_STEP_COUNT)
        self._next_step_id = 1
        self._failed = False
        self._broken = False

    @property
    def failed(self) -> bool:
        """Whether the runner raised what it should not in this epoch. Safe from any thread."""
        return self._failed

    @property
    def broken(self) -> bool:
        """Whether even the runner's reset failed. Safe from any thread."""
        return self._broken

    def begin(self, epoch: int) -> None:
        """Clears the persistent batch for a new epoch. Raises RunnerFailed when that fails."""
        self._epoch = epoch
        self._steps.clear()
        self._next_step_id = 1
        try:
            self.runner.reset()
        except Exception as error:  # as in _timed; without a reset there is nothing to go on from
            self._failed = self._broken = True
            _logger.exception("reset failed", extra=fields(epoch=epoch))
            raise RunnerFailed(f"reset failed: {type(error).__name__}") from error
        self._failed = False

    def forward(self, plan: StepPlan, arrived: float) -> StepResult:
        """Executes a plan, or answers again for one it has executed.

        Raises any Precondition, PlanInvalid, or RunnerFailed.
        """
        self._require_epoch(plan.epoch)
        if plan.step_id < 1:
            raise PlanInvalid("plan.step_id", "steps count from 1")
        if plan.step_id > self._next_step_id:
            raise StepGap(f"step {plan.step_id} came where {self._next_step_id} is next")
        if plan.step_id < self._next_step_id:
            step = self._kept(plan.step_id)
            if step.fingerprint != plan.fingerprint:
                raise StepConflict(f"step {plan.step_id} was executed with another plan")
            return step.result
        self._require_runner()
        self._require_weights(plan)
        last = self._steps[-1] if self._steps else None
        if last is not None and last.held and last.sampled is None:
            raise StepHeld(f"step {last.step_id} is held and must be sampled first")
        result = self._timed(lambda: self.runner.forward(plan), arrived, plan.step_id)
        held = plan.sampling is SamplingMode.HOLD
        self._steps.append(_Step(plan.step_id, plan.fingerprint, held, result))
        self._next_step_id += 1
        return result

    def sample(
        self, epoch: int, step_id: int, masks: GrammarMasks | None, arrived: float
    ) -> StepResult:
        """Samples the held step, or answers again for one it has sampled with the same masks.

        Raises StaleEpoch, StepNotHeld, StepResultGone, StepConflict, PlanInvalid or RunnerFailed.
        """
        self._require_epoch(epoch)
        if not 1 <= step_id < self._next_step_id:
            raise StepNotHeld(f"step {step_id} was not executed")
        step = self._kept(step_id)
        if not step.held:
            raise StepNotHeld(f"step {step_id} did not ask to be held")
        digest = _digest(masks)
        if step.sampled is not None:
            if step.masks_digest != digest:
                raise StepConflict(f"step {step_id} was sampled with other masks")
            return step.sampled
        self._require_runner()
        result = self._timed(lambda: self.runner.sample(step_id, masks), arrived, step_id)
        step.masks_digest, step.sampled = digest, result
        return result

    def _require_epoch(self, epoch: int) -> None:
        if epoch < 1 or epoch != self._epoch:
            raise StaleEpoch(f"epoch {epoch} does not hold the claim, {self._epoch} does")

    def _require_runner(self) -> None:
        if self._failed:
            raise RunnerFailed("an earlier step of this epoch failed; attach again")

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

    def _timed(self, execute: Callable[[], StepResult], arrived: float, step_id: int) -> StepResult:
        started = self._clock()
        try:
            result = execute()
        except WorkerError:
            raise
        except Exception as error:  # whatever a model can raise ends the epoch, not the process
            self._failed = True
            _logger.exception("step failed", extra=fields(epoch=self._epoch, step_id=step_id))
            raise RunnerFailed(f"step {step_id} failed: {type(error).__name__}") from error
        return replace(
            result,
            queued_seconds=max(0.0, started - arrived),
            executed_seconds=self._clock() - started,
        )


def _digest(masks: GrammarMasks | None) -> bytes:
    if masks is None:
        return b""
    digest = hashlib.blake2b(masks.rows.tobytes(), digest_size=16)
    digest.update(masks.bitmasks.tobytes())
    return digest.digest()
