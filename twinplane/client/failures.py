"""Turns a call's status into the error that callers see: one table, for both clients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from twinplane.errors import (
    Cancelled,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    TwinplaneError,
    Unavailable,
    Violation,
)

_DETAILS_KEY = "grpc-status-details-bin"

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
    """The error for a failed call, with all that its google.rpc details say."""
    error_info = error_details_pb2.ErrorInfo()
    retry_info = error_details_pb2.RetryInfo()
    bad_request = error_details_pb2.BadRequest()
    retry_after: float | None = None
    for detail in _details(failure.trailing_metadata()):
        detail.Unpack(error_info)
        detail.Unpack(bad_request)
        if detail.Unpack(retry_info):
            retry_after = max(0.0, retry_info.retry_delay.ToTimedelta().total_seconds())
    code = failure.code()
    return _ERRORS.get(code, InternalError)(
        failure.details() or code.name,
        reason=error_info.reason,
        metadata=error_info.metadata,
        retry_after=retry_after,
        violations=tuple(
            Violation(violation.field, violation.description)
            for violation in bad_request.field_violations
        ),
    )


def _details(trailing_metadata: Iterable[Any] | None) -> list[any_pb2.Any]:
    for key, value in trailing_metadata or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(status_pb2.Status.FromString(value).details)
            except DecodeError:
                return []  # the code and its message still say what happened
    return []
