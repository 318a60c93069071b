"""Why the worker refuses a message. But for the last two, nothing was executed. The tree:

WorkerError
├── PlanInvalid           the message is malformed in any state: names the field
├── UpdateInvalid         other weights don't fit the model: names the field or the tensor
├── SourceLost            other weights did not come
├── MemoryLacking         there is no memory for them
├── Precondition          the message does not follow from this state
│   ├── StaleEpoch        ContractMismatch      WeightVersionMismatch
│   ├── StepGap           StepResultGone        StepConflict
│   ├── RowNotHeld        a row whose logits do not wait for Sample
│   ├── AdapterInUse      rows use the slot
│   ├── UpdateConflict    other weights are being prepared, or wait, than the message means
│   ├── Asleep            weights or KV are not there until Wake
│   └── PlanMismatch      the planes have drifted apart: resync
├── WorkerUnavailable     the worker executes nothing at present
│   ├── WorkerLoading
│   └── WorkerDraining
├── GroupLost             another rank of the replica is gone: the epoch is over
└── RunnerFailed          a bug ended the epoch
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import ClassVar


class Reason(StrEnum):
    """The names that a worker uses of the contract's ErrorReason."""

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
    GROUP_LOST = "GROUP_LOST"
    RUNNER_FAILED = "RUNNER_FAILED"
    INVALID_UPDATE = "INVALID_UPDATE"
    UPDATE_CONFLICT = "UPDATE_CONFLICT"
    SOURCE_LOST = "SOURCE_LOST"
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    ADAPTER_IN_USE = "ADAPTER_IN_USE"
    ASLEEP = "ASLEEP"


class WorkerError(Exception):
    """A request the worker refuses. Each error that is raised has a reason of its own.

    `step_id` is the refused message's, 0 where the request is about no step. `rows` are the rows of
    the persistent batch that are to blame, as far as that is known: without them the message would
    have been executed.
    """

    reason: ClassVar[Reason]

    def __init__(self, message: str, rows: Iterable[int] = ()) -> None:
        super().__init__(message)
        self.rows = tuple(int(row) for row in rows)
        self.step_id = 0


class PlanInvalid(WorkerError):
    """The plan is malformed, whatever the worker's state."""

    reason = Reason.INVALID_PLAN

    def __init__(self, field_path: str, description: str, rows: Iterable[int] = ()) -> None:
        super().__init__(f"{field_path}: {description}", rows)
        self.field_path = field_path
        self.description = description


class UpdateInvalid(WorkerError):
    """Weights, or an adapter, that don't fit the model or each other. Nothing has changed."""

    reason = Reason.INVALID_UPDATE

    def __init__(self, field_path: str, description: str) -> None:
        super().__init__(f"{field_path}: {description}")
        self.field_path = field_path
        self.description = description


class SourceLost(WorkerError):
    """The source of an update ended, broke or did not come. Nothing has changed."""

    reason = Reason.SOURCE_LOST


class MemoryLacking(WorkerError):
    """The device or the host has too little memory. Nothing has changed."""

    reason = Reason.OUT_OF_MEMORY


class Precondition(WorkerError):
    """The request does not follow from the worker's state."""


class StaleEpoch(Precondition):
    """Another controller holds a newer claim."""

    reason = Reason.STALE_EPOCH


class ContractMismatch(Precondition):
    """No contract version is shared."""

    reason = Reason.CONTRACT_VERSION_MISMATCH


class WeightVersionMismatch(Precondition):
    """The plan was made for other weights."""

    reason = Reason.WEIGHT_VERSION_MISMATCH


class StepGap(Precondition):
    """A step id is missing before this one."""

    reason = Reason.STEP_GAP


class StepResultGone(Precondition):
    """The step was executed and its result is no longer kept."""

    reason = Reason.STEP_RESULT_GONE


class StepConflict(Precondition):
    """Another plan was executed under this step id."""

    reason = Reason.STEP_CONFLICT


class RowNotHeld(Precondition):
    """Sample names a row whose logits that step does not hold."""

    reason = Reason.ROW_NOT_HELD


class PlanMismatch(Precondition):
    """Rows, positions or tokens differ from what the worker holds."""

    reason = Reason.PLAN_MISMATCH


class AdapterInUse(Precondition):
    """Rows of the persistent batch use the adapter's slot."""

    reason = Reason.ADAPTER_IN_USE


class UpdateConflict(Precondition):
    """Another update is being prepared or waits. `update_id` is its name, empty where there is
    none."""

    reason = Reason.UPDATE_CONFLICT

    def __init__(self, message: str, update_id: str = "") -> None:
        super().__init__(message)
        self.update_id = update_id


class Asleep(Precondition):
    """The worker does without its weights or its KV pool until it is woken."""

    reason = Reason.ASLEEP


class WorkerUnavailable(WorkerError):
    """The worker executes nothing at present; the same request may be answered later."""


class WorkerLoading(WorkerUnavailable):
    """The weights are being loaded."""

    reason = Reason.WORKER_LOADING


class WorkerDraining(WorkerUnavailable):
    """The worker finishes what it has and then ends."""

    reason = Reason.WORKER_DRAINING


class GroupLost(WorkerError):
    """A rank of the replica is gone, hangs, did not come, or a newer claim ended its group.

    This rank is sound, and goes on with the next epoch's group. No request is to blame.
    """

    reason = Reason.GROUP_LOST


class RunnerFailed(WorkerError):
    """The runner raised an unexpected error: nothing runs in this epoch any more."""

    reason = Reason.RUNNER_FAILED
