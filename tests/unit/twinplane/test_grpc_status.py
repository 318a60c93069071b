"""Error statuses: what is written is what Google's own library and our reader read."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from twinplane.common.v1.errors_pb2 import ERROR_REASON_QUEUE_FULL
from twinplane.errors import Violation
from twinplane.grpc.status import Status, internal_status, read, reason_name

FULL = Status(
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    reason_name(ERROR_REASON_QUEUE_FULL),
    "9 requests wait",
    violations=(Violation("text", "too long"), Violation("stop.strings", "too many")),
    retry_after=2.5,
    quota="waiting requests",
    metadata={"limit": "9"},
)


def failure(code: grpc.StatusCode, trailer: bytes | None, message: str = "") -> grpc.RpcError:
    trailers = grpc.aio.Metadata(("other", "x"))
    if trailer is not None:
        trailers.add("grpc-status-details-bin", trailer)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailers, details=message)


def failure_of(status: Status) -> grpc.RpcError:
    return failure(status.code, status.to_pb().SerializeToString(), status.message)


@pytest.mark.parametrize(
    "status",
    [FULL, Status(grpc.StatusCode.NOT_FOUND, "MODEL_NOT_FOUND", "none"), internal_status("e-1")],
    ids=["all details", "reason only", "internal"],
)
def test_what_is_written_is_read(status: Status) -> None:
    assert read(failure_of(status)) == status


def test_googles_own_reader_sees_each_detail_once() -> None:
    status = rpc_status.from_call(failure_of(FULL))
    assert (status.code, status.message) == (8, "9 requests wait")
    info, bad, retry, quota = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.BadRequest(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.QuotaFailure(),
    )
    for detail, packed in zip((info, bad, retry, quota), status.details, strict=True):
        assert packed.Unpack(detail)
    assert (info.reason, info.domain, info.metadata) == ("QUEUE_FULL", "twinplane", {"limit": "9"})
    assert [violation.field for violation in bad.field_violations] == ["text", "stop.strings"]
    assert retry.retry_delay.ToMilliseconds() == 2500
    assert [violation.subject for violation in quota.violations] == ["waiting requests"]


@pytest.mark.parametrize(
    "trailer",
    [
        None,
        b"\xff\xff",
        status_pb2.Status(code=5, details=FULL.to_pb().details).SerializeToString(),
    ],
    ids=["no details", "no status", "another code"],
)
def test_details_of_no_server_of_ours_are_passed_over(trailer: bytes | None) -> None:
    code = grpc.StatusCode.UNAVAILABLE
    assert read(failure(code, trailer, "connection reset")) == Status(code, "", "connection reset")


def test_a_status_without_a_message_is_named_by_its_code() -> None:
    assert read(failure(grpc.StatusCode.UNAVAILABLE, None)).message == "UNAVAILABLE"


def test_a_delay_is_never_negative() -> None:
    past = Status(grpc.StatusCode.UNAVAILABLE, "NO_WORKER", "gone", retry_after=-3.0)
    assert read(failure_of(past)).retry_after == 0.0
