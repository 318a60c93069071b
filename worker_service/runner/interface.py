"""What the facade asks of a runner."""

from __future__ import annotations

from typing import Protocol

from worker_service.domain.capability import Capability, MemoryPool
from worker_service.domain.plan import GrammarMasks, StepPlan, StepResult


class Runner(Protocol):
    """What the facade owns: executes plans one at a time, on the thread that owns the device.

    The real one is runner.model_runner.ModelRunner; simulated.runner.SimulatedRunner has no model.
    """

    def capability(self) -> Capability:
        """Static facts. Safe from any thread once the runner is built."""
        ...

    def memory_pool(self) -> MemoryPool:
        """Geometry and current bytes."""
        ...

    def reset(self) -> None:
        """Clears the persistent batch and any held step: a new epoch begins."""
        ...

    def forward(self, plan: StepPlan) -> StepResult:
        """Applies and executes a plan. Raises PlanInvalid or PlanMismatch with nothing changed."""
        ...

    def sample(self, step_id: int, masks: GrammarMasks | None) -> StepResult:
        """Samples the step that forward held. Raises PlanInvalid for masks that do not fit it."""
        ...
