"""What the facade asks of a runner: a step is launched now and collected when it is done.

Weights, adapters, sleep and pooling get protocols of their own, not more methods on this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from worker_service.domain.capability import Capability, MemoryPool
from worker_service.domain.plan import SamplePlan, StepPlan, StepResult
from worker_service.domain.rendezvous import Rendezvous
from worker_service.runner.adapters import AdapterSlots


class PendingStep(Protocol):
    """A launched step. The device may still work on it while later steps are launched."""

    def is_ready(self) -> bool:
        """Whether `result` would return at once."""
        ...

    def result(self) -> StepResult:
        """Waits for the step and returns its result. Every call raises what the device raised."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CompletedStep:
    """A PendingStep of a runner that computes at launch, as those on a CPU do."""

    completed: StepResult

    def is_ready(self) -> bool:
        """Always true."""
        return True

    def result(self) -> StepResult:
        """See PendingStep."""
        return self.completed


@runtime_checkable
class Ranked(Protocol):
    """A runner that is one of a replica's ranks. Asked only where there are several."""

    def join(self, rendezvous: Rendezvous) -> None:
        """Meets the other ranks for an epoch, after `reset`. On the device thread.

        Loading needs no group; without one no step can be launched. Raises GroupLost when a rank
        does not come in time, or `abandon` overtakes this.
        """
        ...

    def abandon(self, before_epoch: int) -> None:
        """Leaves the group of an older epoch, at any time and from any thread.

        A step or a `join` of such an epoch that waits for other ranks raises GroupLost soon, so
        that the device thread is free for the next claim. The other ranks' steps end, too.
        """
        ...


@runtime_checkable
class Adaptable(Protocol):
    """A runner with adapter slots, of which it may have none."""

    @property
    def adapters(self) -> AdapterSlots:
        """The slots. Always the same object."""
        ...


class Runner(Protocol):
    """Executes plans one after another, on the thread that owns the device.

    The real one is runner.model_runner.ModelRunner; simulated.runner.SimulatedRunner has no model.
    """

    def capability(self) -> Capability:
        """Static facts. Safe from any thread once the runner is built."""
        ...

    def memory_pool(self) -> MemoryPool:
        """Geometry and current bytes."""
        ...

    def reset(self) -> None:
        """Clears the persistent batch and the held rows: a new epoch begins."""
        ...

    def launch(self, plan: StepPlan) -> PendingStep:
        """Applies a plan and starts it behind the steps launched before.

        Raises PlanInvalid or PlanMismatch with nothing changed, or GroupLost.
        """
        ...

    def launch_sample(self, plan: SamplePlan) -> PendingStep:
        """Starts the sampling of held rows.

        Raises RowNotHeld, or PlanInvalid for masks that do not fit, with nothing changed.
        """
        ...
