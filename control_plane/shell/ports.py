"""What the driver needs of the world, as protocols: a worker and a clock."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
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
    executor: str
    attention_backend: str


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """What the control plane uses of a worker's KV pool. `block_count` includes the null block."""

    block_count: int
    block_size: int
    bytes_per_block: int


class WorkerLost(Exception):
    """The worker can't be reached, or its stream broke: attach again and resync."""


class RefusalReason(StrEnum):
    """Why a worker refuses a message: the names that a worker uses of the contract's ErrorReason.

    UNKNOWN stands for every reason that this controller does not know, e.g. a newer worker's.
    """

    INVALID_PLAN = "INVALID_PLAN"
    STALE_EPOCH = "STALE_EPOCH"
    CONTRACT_VERSION_MISMATCH = "CONTRACT_VERSION_MISMATCH"
    WEIGHT_VERSION_MISMATCH = "WEIGHT_VERSION_MISMATCH"
    STEP_GAP = "STEP_GAP"
    STEP_RESULT_GONE = "STEP_RESULT_GONE"
    STEP_CONFLICT = "STEP_CONFLICT"
    ROW_NOT_HELD = "ROW_NOT_HELD"
    PLAN_MISMATCH = "PLAN_MISMATCH"
    WORKER_LOADING = "WORKER_LOADING"
    WORKER_DRAINING = "WORKER_DRAINING"
    RUNNER_FAILED = "RUNNER_FAILED"
    INTERNAL = "INTERNAL"
    UNKNOWN = "UNKNOWN"

    @classmethod
    def _missing_(cls, value: object) -> RefusalReason:
        return cls.UNKNOWN


class WorkerRefused(Exception):
    """The worker refused a message and said why."""

    def __init__(self, reason: RefusalReason, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason


class WorkerUnusable(Exception):
    """The worker answers, but this controller's settings and the worker's limits leave no room to
    run anything.
    """


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
