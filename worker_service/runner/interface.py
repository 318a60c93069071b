"""What the facade asks of a runner: a step is launched now and collected when it is done.

Weights, adapters, sleep and pooling get protocols of their own, not more methods on this one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from worker_service.domain.capability import Capability, MemoryPool
from worker_service.domain.plan import SamplePlan, StepPlan, StepResult, WeightVersion
from worker_service.domain.rendezvous import Rendezvous
from worker_service.domain.weights import (
    PreparedWeights,
    SleepTag,
    TensorChunk,
    TensorDescription,
    WeightsUpdate,
)
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


class PreparationCancelled(Exception):
    """Nobody wants what was being prepared any more."""


class RestoreFailed(Exception):
    """A commit in place has failed, and the weights before it can't be loaded again."""


class Prepared(Protocol):
    """Weights that wait for their commit. Only their runner knows more of them."""

    @property
    def facts(self) -> PreparedWeights:
        """What is told of them."""
        ...

    def drop(self) -> None:
        """Frees them; after their commit, the weights that were live before. On the thread that
        prepares weights."""
        ...


class Preparation(Protocol):
    """An update that is being prepared, on a thread of its own."""

    def put(self, chunk: TensorChunk) -> None:
        """Takes bytes of a stream. Raises UpdateInvalid."""
        ...

    def finish(self) -> Prepared:
        """Waits for what is still to come, checks it, and makes of it what the device runs.

        Raises UpdateInvalid, MemoryLacking, SourceLost or PreparationCancelled.
        """
        ...

    def close(self) -> None:
        """Drops all that it holds, and what it has made."""
        ...


@runtime_checkable
class Updatable(Protocol):
    """A runner that takes other weights while it executes plans."""

    def begin_update(self, update: WeightsUpdate, is_cancelled: Callable[[], bool]) -> Preparation:
        """Checks all that the description shows, then takes the memory. On the thread that
        prepares weights, one update at a time.

        `is_cancelled` is asked between pieces of work; then what runs raises PreparationCancelled.
        Raises UpdateInvalid or MemoryLacking.
        """
        ...

    def commit_update(self, prepared: Prepared) -> WeightVersion:
        """Makes prepared weights live, between two steps. On the device thread.

        Returns the capability's new weight version. A commit in place that fails has loaded the
        weights before it again, and raises UpdateInvalid or MemoryLacking; or RestoreFailed where
        that fails, too. Raises Asleep.
        """
        ...

    def tensors(self) -> tuple[TensorDescription, ...]:
        """The live weights by name, whole and before any conversion. Any thread."""
        ...


@runtime_checkable
class Sleeper(Protocol):
    """A runner that can do without its memory for a while. On the device thread."""

    def sleep(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """Frees memory. Returns all that is free then; no step may be launched meanwhile.

        Raises PlanMismatch where KV is to go that rows still need.
        """
        ...

    def wake(self, tags: frozenset[SleepTag]) -> frozenset[SleepTag]:
        """Takes memory again. Returns what is still free. Raises MemoryLacking with nothing
        changed, or RestoreFailed where the weights are no longer where they came from."""
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
