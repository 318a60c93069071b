"""Why the worker refuses a message. Whatever is refused was not executed. The tree:

WorkerError
├── PlanInvalid           the plan could follow from no state: names the field
├── Precondition          the plan does not follow from this state
│   ├── StaleEpoch        ContractMismatch      WeightVersionMismatch
│   ├── StepGap           StepResultGone        StepConflict
│   ├── RowNotHeld        a row whose logits do not wait for Sample
│   └── PlanMismatch      the planes have drifted apart: resync
├── WorkerUnavailable     executes nothing at present
│   ├── WorkerLoading
│   └── WorkerDraining
└── RunnerFailed          a bug ended the epoch
"""

from __future__ import annotations


class WorkerError(Exception):
    """A request the worker refuses; nothing was executed. `reason` goes into ErrorInfo."""

    reason = "INTERNAL"


class PlanInvalid(WorkerError):
    """The plan is malformed, whatever the worker's state."""

    reason = "INVALID_PLAN"

    def __init__(self, field_path: str, description: str) -> None:
        super().__init__(f"{field_path}: {description}")
        self.field_path = field_path
        self.description = description


class Precondition(WorkerError):
    """The request does not follow from the worker's state."""


class StaleEpoch(Precondition):
    """Another controller holds a newer claim."""

    reason = "STALE_EPOCH"


class ContractMismatch(Precondition):
    """No contract version is shared."""

    reason = "CONTRACT_VERSION_MISMATCH"


class WeightVersionMismatch(Precondition):
    """The plan was made for other weights."""

    reason = "WEIGHT_VERSION_MISMATCH"


class StepGap(Precondition):
    """A step id is missing before this one."""

    reason = "STEP_GAP"


class StepResultGone(Precondition):
    """The step was executed and its result is no longer kept."""

    reason = "STEP_RESULT_GONE"


class StepConflict(Precondition):
    """Another plan was executed under this step id."""

    reason = "STEP_CONFLICT"


class RowNotHeld(Precondition):
    """Sample names a row whose logits that step does not hold."""

    reason = "ROW_NOT_HELD"


class PlanMismatch(Precondition):
    """Rows, positions or tokens differ from what the worker holds."""

    reason = "PLAN_MISMATCH"


class WorkerUnavailable(WorkerError):
    """The worker executes nothing at present; the same request may be answered later."""

    reason = "WORKER_UNAVAILABLE"


class WorkerLoading(WorkerUnavailable):
    """The weights are being loaded."""

    reason = "WORKER_LOADING"


class WorkerDraining(WorkerUnavailable):
    """The worker finishes what it has and then ends."""

    reason = "WORKER_DRAINING"


class RunnerFailed(WorkerError):
    """The runner raised what it should not: nothing runs in this epoch any more."""

    reason = "RUNNER_FAILED"
