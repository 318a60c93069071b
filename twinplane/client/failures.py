"""Turns a call's status into the error that callers see, or into another attempt."""

from __future__ import annotations

import grpc

from twinplane.client.retry import Attempts
from twinplane.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TwinplaneError,
    Unavailable,
)
from twinplane.grpc.status import read

# A code that is not here is InternalError: the server has no reason to send it.
_ERRORS: dict[grpc.StatusCode, type[TwinplaneError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
}


def error_of(failure: grpc.RpcError) -> TwinplaneError:
    """The error for a failed call, with all that its status says."""
    status = read(failure)
    return _ERRORS.get(status.code, InternalError)(
        status.message,
        reason=status.reason,
        metadata=status.metadata,
        retry_after=status.retry_after,
        violations=status.violations,
    )


def wait_or_raise(attempts: Attempts, failure: grpc.RpcError) -> float:
    """Returns the seconds to wait before the next attempt. Raises the error when there is none."""
    error = error_of(failure)
    wait = attempts.wait_after(error)
    if wait is None:
        raise error from failure
    return wait
