"""The worker's refusals as statuses: the one table from its errors to code, reason and details."""

from __future__ import annotations

import grpc

from twinplane.errors import Violation
from twinplane.grpc.status import Status
from worker_service.domain.errors import (
    PlanInvalid,
    Precondition,
    RunnerFailed,
    WorkerUnavailable,
)

_RETRY_SECONDS = 1.0


def status_of(error: Exception) -> Status | None:
    """The error's status. None means that nobody expected this error: it is a bug of ours."""
    message = str(error)
    code = grpc.StatusCode
    match error:
        case PlanInvalid(reason=reason, field_path=path, description=description):
            violations = (Violation(path, description),)
            return Status(code.INVALID_ARGUMENT, reason, message, violations=violations)
        case Precondition(reason=reason):
            return Status(code.FAILED_PRECONDITION, reason, message)
        case WorkerUnavailable(reason=reason):
            return Status(code.UNAVAILABLE, reason, message, retry_after=_RETRY_SECONDS)
        case RunnerFailed(reason=reason):
            return Status(code.INTERNAL, reason, message)
        case _:
            return None
