"""Steps of ranks that are still pending when another epoch begins, or when the worker ends."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from tests.support.worker_rig import MODEL, NO_LATENCY, PATIENCE, until
from twinplane.bounds import MAX_EPOCH
from worker_service.domain.capability import RankCoordinates
from worker_service.domain.errors import GroupLost, RunnerFailed
from worker_service.domain.plan import ScheduledRows, StepPlan, StepResult
from worker_service.domain.rendezvous import Rendezvous
from worker_service.facade import WorkerFacade
from worker_service.runner.interface import PendingStep
from worker_service.simulated.runner import SimulatedRunner
from worker_service.step_log import StepLog

RANKS = RankCoordinates((1, 2))


class Arriving:
    """A step whose tokens another rank samples: lost once the group is."""

    def __init__(self, error: Exception | None, result: StepResult) -> None:
        self.ready = threading.Event()
        self.error = error
        self._result = result

    def is_ready(self) -> bool:
        return self.ready.is_set()

    def result(self) -> StepResult:
        assert self.ready.wait(PATIENCE)
        if self.error is not None:
            raise self.error
        return self._result


class Following(SimulatedRunner):
    """Its steps wait until a test, `abandon` or `reset` ends them."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(replace(MODEL, ranks=RANKS), NO_LATENCY)
        self.error = error
        self.steps: list[Arriving] = []
        self.resets = 0
        self.abandoned: list[int] = []

    def launch(self, plan: StepPlan) -> PendingStep:
        self.steps.append(Arriving(self.error, super().launch(plan).result()))
        return self.steps[-1]

    def reset(self) -> None:
        super().reset()
        self.resets += 1

    def abandon(self, before_epoch: int) -> None:
        self.abandoned.append(before_epoch)
        for step in self.steps:
            step.error = GroupLost("abandoned")
            step.ready.set()

    def join(self, rendezvous: Rendezvous) -> None:
        pass


def plan(runner: SimulatedRunner, epoch: int = 1, step_id: int = 1) -> StepPlan:
    none = np.empty(0, dtype=np.int32)
    weights = runner.capability().weight_version
    return StepPlan(epoch, step_id, weights, none, (), ScheduledRows(), bytes)


@pytest.mark.parametrize("error", [GroupLost("gone"), ValueError("a bug")], ids=str)
def test_a_late_step_of_an_old_epoch_does_not_fail_the_new_one(error: Exception) -> None:
    runner = Following(error)
    log = StepLog(runner, lambda: 0.0)
    log.begin(1)
    late = log.launch(plan(runner), 0.0)
    log.begin(2)
    runner.steps[0].ready.set()
    with pytest.raises((GroupLost, RunnerFailed)):
        late.result()
    assert not log.failed
    runner.error = None
    step = log.launch(plan(runner, epoch=2), 0.0)
    runner.steps[1].ready.set()
    assert step.result().epoch == 2


def test_a_lost_group_fails_its_own_epoch() -> None:
    runner = Following(GroupLost("gone"))
    log = StepLog(runner, lambda: 0.0)
    log.begin(1)
    step = log.launch(plan(runner), 0.0)
    runner.steps[0].ready.set()
    with pytest.raises(GroupLost) as lost:
        step.result()
    assert (log.failed, lost.value.step_id) == (True, 1)
    with pytest.raises((GroupLost, RunnerFailed)):
        log.launch(plan(runner, step_id=2), 0.0)


async def rank(runner: Following) -> WorkerFacade:
    facade = WorkerFacade(lambda: runner, worker_id="w", incarnation_id="i")
    await facade.load()
    await facade.attach(1, "c", 1, 1, Rendezvous(1, "127.0.0.1", 1, "k"))
    return facade


async def test_a_rank_leaves_its_group_behind_its_last_step() -> None:
    runner = Following()
    facade = await rank(runner)
    step = await facade.submit(plan(runner))
    closing = asyncio.create_task(facade.close())
    await until(lambda: bool(runner.steps))
    before = runner.resets
    runner.steps[0].ready.set()
    await asyncio.wait_for(closing, PATIENCE)
    assert (await step).digest
    assert (before, runner.resets) == (1, 2)
    await facade.close()
    assert runner.resets == 2


async def test_a_rank_in_a_hurry_waits_for_no_other() -> None:
    runner = Following()
    facade = await rank(runner)
    step = await facade.submit(plan(runner))
    closing = asyncio.create_task(facade.close())
    await until(lambda: bool(runner.steps))
    facade.hurry()
    await asyncio.wait_for(closing, PATIENCE)
    assert runner.abandoned[-1] == MAX_EPOCH + 1
    with pytest.raises(GroupLost):
        await step
