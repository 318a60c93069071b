"""The worker's refusals as gRPC statuses, by one table.

Each carries ErrorInfo (reason, domain "twinplane"); a malformed message also BadRequest with the
field named, a passing state also RetryInfo.
"""

from __future__ import annotations

from typing import Any, NoReturn

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2

from worker_service.domain.errors import (
    PlanInvalid,
    Precondition,
    RunnerFailed,
    WorkerError,
    WorkerUnavailable,
)

ERROR_DOMAIN = "twinplane"
RETRY_AFTER_SECONDS = 1

_CODES: tuple[tuple[type[WorkerError], grpc.StatusCode], ...] = (
    (PlanInvalid, grpc.StatusCode.INVALID_ARGUMENT),
    (Precondition, grpc.StatusCode.FAILED_PRECONDITION),
    (WorkerUnavailable, grpc.StatusCode.UNAVAILABLE),
    (RunnerFailed, grpc.StatusCode.INTERNAL),
)


def code_of(error: WorkerError) -> grpc.StatusCode:
    """The canonical code of a refusal."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    return grpc.StatusCode.INTERNAL


def status_of(error: WorkerError) -> status_pb2.Status:
    """The whole status: code, message for people, details for programs."""
    details = [error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN)]
    if isinstance(error, PlanInvalid):
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=error.field_path, description=error.description
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if isinstance(error, WorkerUnavailable):
        delay = Duration(seconds=RETRY_AFTER_SECONDS)
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    packed = []
    for detail in details:
        packed.append(AnyMessage())
        packed[-1].Pack(detail)
    return status_pb2.Status(code=code_of(error).value[0], message=str(error), details=packed)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: WorkerError) -> NoReturn:
    """Ends the call with the refusal's status."""
    trailers = (("grpc-status-details-bin", status_of(error).SerializeToString()),)
    await context.abort(code_of(error), str(error), trailers)
    raise AssertionError("abort raises")
