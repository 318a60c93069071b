"""Error statuses with google.rpc details. Only this module writes them, and only it reads them.

A status travels as the call's code and message, and once more with its details in a trailer. Every
status of a Twinplane service has an ErrorInfo with the domain "twinplane" and a reason of
twinplane.common.v1.ErrorReason. RetryInfo's delay has a trailer of its own beside it, which gRPC's
clients obey by themselves once they are told to retry.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message
from google.rpc import error_details_pb2, status_pb2

from twinplane.common.v1.errors_pb2 import (
    ERROR_REASON_DEADLINE_PASSED,
    ERROR_REASON_INTERNAL,
    ERROR_REASON_MALFORMED_MESSAGE,
    ERROR_REASON_MESSAGE_TOO_LARGE,
    ERROR_REASON_METHOD_NOT_FOUND,
    ErrorReason,
)
from twinplane.errors import Violation
from twinplane.grpc.messages import MalformedMessage, MessageError, MessageTooLarge

ERROR_DOMAIN = "twinplane"

_DETAILS_KEY = "grpc-status-details-bin"
_PUSHBACK_KEY = "grpc-retry-pushback-ms"
_REASON_PREFIX = "ERROR_REASON_"
_MAX_QUOTED_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class Status:
    """An error status.

    `reason` and `metadata` are ErrorInfo's; the reason is empty when a server sent none.
    `violations` are BadRequest's. `retry_after` is RetryInfo's, in seconds. `quota` is the subject
    of a QuotaFailure: what ran out.
    """

    code: grpc.StatusCode
    reason: str
    message: str
    violations: tuple[Violation, ...] = ()
    retry_after: float | None = None
    quota: str | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def to_pb(self) -> status_pb2.Status:
        """The google.rpc.Status that goes on the wire."""
        code: int = self.code.value[0]
        status = status_pb2.Status(code=code, message=self.message)
        for detail in self._details():
            status.details.add().Pack(detail)
        return status

    def _details(self) -> list[Message]:
        details: list[Message] = [
            error_details_pb2.ErrorInfo(
                reason=self.reason, domain=ERROR_DOMAIN, metadata=self.metadata
            )
        ]
        if self.violations:
            bad_request = error_details_pb2.BadRequest()
            for violation in self.violations:
                bad_request.field_violations.add(
                    field=violation.field, description=violation.description
                )
            details.append(bad_request)
        if self.retry_after is not None:
            delay = Duration()
            delay.FromNanoseconds(round(self.retry_after * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        if self.quota is not None:
            quota_failure = error_details_pb2.QuotaFailure()
            quota_failure.violations.add(subject=self.quota, description=self.message)
            details.append(quota_failure)
        return details


def reason_name(reason: ErrorReason) -> str:
    """A reason as it travels: its name without the prefix."""
    return ErrorReason.Name(reason).removeprefix(_REASON_PREFIX)


def internal_status(error_id: str) -> Status:
    """The status for a bug of ours: it says only the id under which the log tells more."""
    return Status(
        grpc.StatusCode.INTERNAL,
        reason_name(ERROR_REASON_INTERNAL),
        "internal error",
        metadata={"error_id": error_id},
    )


def message_status(error: MessageError) -> Status:
    """The status for a message that can't be looked at."""
    message = str(error)
    if isinstance(error, MessageTooLarge):
        reason = reason_name(ERROR_REASON_MESSAGE_TOO_LARGE)
        return Status(grpc.StatusCode.RESOURCE_EXHAUSTED, reason, message, quota="message bytes")
    path = error.field if isinstance(error, MalformedMessage) else ""
    return Status(
        grpc.StatusCode.INVALID_ARGUMENT,
        reason_name(ERROR_REASON_MALFORMED_MESSAGE),
        message,
        violations=(Violation(path, message),),
    )


def deadline_status() -> Status:
    """The status for a call that comes to its turn too late."""
    return Status(
        grpc.StatusCode.DEADLINE_EXCEEDED,
        reason_name(ERROR_REASON_DEADLINE_PASSED),
        "the deadline passed before anything was done",
    )


def no_method_status(method: str, services: Sequence[str]) -> Status:
    """The status for a call of an RPC that the server lacks. `services` are those that it has."""
    name = method[:_MAX_QUOTED_CHARACTERS]
    return Status(
        grpc.StatusCode.UNIMPLEMENTED,
        reason_name(ERROR_REASON_METHOD_NOT_FOUND),
        f"this server has no RPC {name}; it serves {', '.join(services)}",
        metadata={"services": ",".join(services)},
    )


async def abort(context: grpc.aio.ServicerContext[Any, Any], status: Status) -> NoReturn:
    """Ends the call with the status. Raises what ends a call in grpc.aio."""
    if status.violations or status.metadata:
        details = status.to_pb().SerializeToString()
    else:
        details = _plain_details(
            status.code, status.reason, status.message, status.retry_after, status.quota
        )
    trailers: tuple[tuple[str, str | bytes], ...] = ((_DETAILS_KEY, details),)
    if status.retry_after is not None:
        # Some clients take 0 for no word from the server, and back off by themselves.
        pushback_ms = max(1, math.ceil(status.retry_after * 1e3))
        trailers += ((_PUSHBACK_KEY, str(pushback_ms)),)
    await context.abort(status.code, status.message, trailers)


@lru_cache(maxsize=64)
def _plain_details(
    code: grpc.StatusCode, reason: str, message: str, retry_after: float | None, quota: str | None
) -> bytes:
    """The details of a status that says nothing of its call: a server that is full gives the same
    answer thousands of times."""
    status = Status(code, reason, message, retry_after=retry_after, quota=quota)
    details: bytes = status.to_pb().SerializeToString()
    return details


def read(error: grpc.RpcError) -> Status:
    """The status that a call has failed with, from any server. For both kinds of client."""
    return read_ended(error.code(), error.details(), error.trailing_metadata())


def read_ended(
    code: grpc.StatusCode, message: str | None, trailing_metadata: Iterable[Any] | None
) -> Status:
    """Does what `read` does, from the parts of a call that has ended.

    Details that can't be parsed, or that contradict the code, are ignored: no server of ours sends
    such, and the code and the message still say what happened.
    """
    error_info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry_info = error_details_pb2.RetryInfo()
    quota_failure = error_details_pb2.QuotaFailure()
    retry_after: float | None = None
    for detail in _packed_details(code, trailing_metadata):
        detail.Unpack(error_info)
        detail.Unpack(bad_request)
        detail.Unpack(quota_failure)
        if detail.Unpack(retry_info):
            retry_after = max(0.0, retry_info.retry_delay.ToTimedelta().total_seconds())
    return Status(
        code,
        error_info.reason,
        message or code.name,
        violations=tuple(
            Violation(violation.field, violation.description)
            for violation in bad_request.field_violations
        ),
        retry_after=retry_after,
        quota=next((violation.subject for violation in quota_failure.violations), None),
        metadata=dict(error_info.metadata),
    )


def _packed_details(
    code: grpc.StatusCode, trailing_metadata: Iterable[Any] | None
) -> Iterable[Any]:
    for key, value in trailing_metadata or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                return ()
            return status.details if status.code == code.value[0] else ()
    return ()
