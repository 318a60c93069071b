"""Fake workers that a poisoned sequence brings down, and how they go down."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from control_plane.core.plan import Row, StepPlan, StepResult
from control_plane.shell.ports import Admit, Attachment, RefusalReason, WorkerLost, WorkerRefused
from tests.simulation.fake_machine import Machine
from tests.simulation.fake_worker import FakeWorker, no_delay
from tests.support.plan_interpreter import deltas


class Effect(Enum):
    """What a step that computes a poisoned position does to the worker."""

    NAMED = "refused, the rows named"
    UNNAMED = "refused, nobody named"
    MISMATCH = "refused as a drift, the rows named"
    FAILED = "the runner fails"
    BROKEN = "the connection breaks"
    DEAD = "the process dies"


class PoisonedWorker(FakeWorker):
    """`poison` has, by the seeds of poisoned sequences, the position that no step may compute."""

    def __init__(
        self,
        machine: Machine,
        poison: Mapping[int, int],
        effect: Effect,
        step_seconds: Callable[[], float] = no_delay,
    ) -> None:
        super().__init__(machine, step_seconds)
        self.poison = poison
        self.effect = effect
        self.down_count = 0
        self._refusal: WorkerRefused | None = None

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        self._refusal = None
        return await super().attach(epoch, admit)

    async def send(self, plan: StepPlan) -> None:
        try:
            await super().send(plan)
        except WorkerLost as lost:  # a call that has ended says why to whoever writes, too
            raise self._refusal or lost from None

    def _execute(self, plan: StepPlan) -> StepResult:
        is_fenced = plan.epoch != self.machine.epoch
        if not is_fenced and (rows := self._poisoned(plan)):
            self._go_down(plan, rows)
        return super()._execute(plan)

    def _poisoned(self, plan: StepPlan) -> list[Row]:
        seeds = {number: row.seed for number, row in self.machine.rows.items()}
        seeds |= {added.row: added.seed for added in plan.added}
        return [
            delta.number
            for delta in deltas(plan)
            if delta.start <= self.poison.get(seeds[delta.number], -1) < delta.start + delta.count
        ]

    def _go_down(self, plan: StepPlan, rows: list[Row]) -> None:
        self.down_count += 1
        self._connected = False
        match self.effect:
            case Effect.NAMED:
                refusal = WorkerRefused(RefusalReason.INVALID_PLAN, "no", plan.step_id, rows)
            case Effect.UNNAMED:
                refusal = WorkerRefused(RefusalReason.INVALID_PLAN, "no", plan.step_id)
            case Effect.MISMATCH:
                refusal = WorkerRefused(RefusalReason.PLAN_MISMATCH, "no", plan.step_id, rows)
            case Effect.FAILED:
                refusal = WorkerRefused(RefusalReason.RUNNER_FAILED, "no", plan.step_id)
            case Effect.BROKEN:
                raise WorkerLost("connection broken")
            case Effect.DEAD:
                self.machine.restart()
                raise WorkerLost("connection broken")
        self._refusal = refusal
        raise refusal
