"""What the driver needs of the world, as protocols: a worker and a clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from control_plane.core.plan import StepPlan, StepResult, WeightVersion


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What the control plane uses of a worker's capability."""

    worker_id: str
    incarnation_id: str
    epoch: int
    model_name: str
    architecture: str
    vocabulary_size: int
    data_type: str
    weight_version: WeightVersion
    max_sequence_count: int
    max_step_token_count: int
    max_sequence_token_count: int
    max_prompt_token_count: int
    max_inflight_step_count: int
    features: frozenset[str]
    device: str
    attention_backend: str


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """What the control plane uses of a worker's KV pool. `block_count` includes the null block."""

    block_count: int
    block_size: int
    bytes_per_block: int


class WorkerLost(Exception):
    """The worker can't be reached, or its stream broke: attach again and resync."""


class WorkerRefused(Exception):
    """The worker refused a message; `reason` is the contract's, e.g. STALE_EPOCH."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class Worker(Protocol):
    """One worker, claimed by one driver. Every method raises WorkerLost or WorkerRefused."""

    async def attach(self, epoch: int | None = None) -> tuple[WorkerInfo, MemoryPool]:
        """Claims the worker, by default one epoch above its current, and opens the pipeline."""
        ...

    async def send(self, plan: StepPlan) -> None:
        """Puts a plan into the pipeline; waits only when the transport is full."""
        ...

    async def receive(self) -> StepResult:
        """The next result, in the order the plans were sent."""
        ...

    async def detach(self) -> None:
        """Closes the pipeline. The worker keeps its claim; never raises."""
        ...


class Clock(Protocol):
    """Monotonic seconds."""

    def __call__(self) -> float: ...
