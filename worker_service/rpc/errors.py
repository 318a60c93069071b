"""The worker's refusals as statuses: the one table from its errors to code, reason and details."""

from __future__ import annotations

import grpc

from twinplane.errors import Violation
from twinplane.grpc.status import Status
from worker_service.domain.errors import (
    GroupLost,
    MemoryLacking,
    PlanInvalid,
    Precondition,
    RunnerFailed,
    SourceLost,
    UpdateConflict,
    UpdateInvalid,
    WorkerError,
    WorkerUnavailable,
)

_RETRY_SECONDS = 1.0
# A status must fit the trailers, for which gRPC's peers allow 8 kB in all.
_MAX_NAMED_ROWS = 256


def status_of(error: Exception) -> Status | None:
    """The error's status. None means that nobody expected this error: it is a bug of ours."""
    message = str(error)
    code = grpc.StatusCode
    match error:
        case PlanInvalid(reason=reason, field_path=path, description=description):
            violations = (Violation(path, description),)
            return Status(
                code.INVALID_ARGUMENT,
                reason,
                message,
                violations=violations,
                metadata=_blame(error),
            )
        case UpdateInvalid(reason=reason, field_path=path, description=description):
            violations = (Violation(path, description),)
            return Status(code.INVALID_ARGUMENT, reason, message, violations=violations)
        case UpdateConflict(reason=reason, update_id=update_id):
            metadata = {"update_id": update_id} if update_id else {}
            return Status(code.FAILED_PRECONDITION, reason, message, metadata=metadata)
        case SourceLost(reason=reason):
            return Status(code.UNAVAILABLE, reason, message, retry_after=_RETRY_SECONDS)
        case MemoryLacking(reason=reason):
            return Status(code.RESOURCE_EXHAUSTED, reason, message, quota="memory")
        case Precondition(reason=reason):
            return Status(code.FAILED_PRECONDITION, reason, message, metadata=_blame(error))
        case WorkerUnavailable(reason=reason):
            return Status(code.UNAVAILABLE, reason, message, retry_after=_RETRY_SECONDS)
        case GroupLost(reason=reason):
            return Status(
                code.UNAVAILABLE,
                reason,
                message,
                retry_after=_RETRY_SECONDS,
                metadata=_blame(error),
            )
        case RunnerFailed(reason=reason):
            return Status(code.INTERNAL, reason, message, metadata=_blame(error))
        case _:
            return None


def _blame(error: WorkerError) -> dict[str, str]:
    """Which step is refused, and which rows are to blame, as ErrorInfo's metadata says it."""
    blame = {"step_id": str(error.step_id)} if error.step_id else {}
    if error.rows:
        blame["rows"] = ",".join(map(str, error.rows[:_MAX_NAMED_ROWS]))
    return blame
