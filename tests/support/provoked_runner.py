"""A runner whose steps fail when a test wants them to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from worker_service.domain.capability import Capability, MemoryPool
from worker_service.domain.plan import RowFault, SamplePlan, StepPlan, StepResult
from worker_service.runner.adapters import AdapterSlots
from worker_service.runner.interface import (
    Adaptable,
    CompletedStep,
    PendingStep,
    Runner,
    Sleeper,
    Updatable,
)

Provoke = Callable[[StepPlan], Sequence[RowFault]]


class ProvokedRunner:
    """A runner around another, which takes updates and sleeps, too. `provoke` is called on the
    device thread with each plan that was not refused: what it raises, the step raises; rows it
    returns faults for get no token."""

    def __init__(self, runner: Runner, provoke: Provoke) -> None:
        assert isinstance(runner, Updatable) and isinstance(runner, Sleeper)
        self._runner = runner
        self.begin_update = runner.begin_update
        self.commit_update = runner.commit_update
        self.tensors = runner.tensors
        self.sleep = runner.sleep
        self.wake = runner.wake
        self._provoke = provoke
        self._held: dict[int, RowFault] = {}

    @property
    def adapters(self) -> AdapterSlots:
        assert isinstance(self._runner, Adaptable)
        return self._runner.adapters

    def capability(self) -> Capability:
        return self._runner.capability()

    def memory_pool(self) -> MemoryPool:
        return self._runner.memory_pool()

    def reset(self) -> None:
        self._runner.reset()
        self._held.clear()

    def launch(self, plan: StepPlan) -> PendingStep:
        pending = self._runner.launch(plan)
        faults = {fault.row: fault for fault in self._provoke(plan)}
        result = pending.result()
        held = {row: faults.pop(row) for row in result.held_rows.tolist() if row in faults}
        self._held |= held
        return CompletedStep(_with_faults(result, faults))

    def launch_sample(self, plan: SamplePlan) -> PendingStep:
        result = self._runner.launch_sample(plan).result()
        faults = {row: self._held.pop(row) for row in plan.rows.tolist() if row in self._held}
        return CompletedStep(_with_faults(result, faults))


def _with_faults(result: StepResult, faults: dict[int, RowFault]) -> StepResult:
    sound = ~np.isin(result.rows, list(faults))
    counts = result.token_counts
    return replace(
        result,
        rows=result.rows[sound],
        token_counts=counts[sound],
        tokens=result.tokens[np.repeat(sound, counts)],
        faults=(
            *(fault for fault in result.faults if fault.row not in faults),
            *faults.values(),
        ),
    )
