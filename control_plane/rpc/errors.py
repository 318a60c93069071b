"""Errors as statuses: the one table from what can go wrong to code, reason and details.

The edge's own errors:

EdgeError
├── InvalidRequest       fields break their rules: names each
├── UnknownModel         no model of this name is served: lists those that are
├── NoModelServed        no worker is attached yet
├── RowFailed            the worker could not compute this request's next token
└── GenerationCancelled  the server ended the request

Every status carries one ErrorInfo of domain "twinplane". Messages never hold a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from control_plane.core.errors import DuplicateRequest, QueueFull, RequestTooLong
from control_plane.shell.engine import DuplicateRequest, EngineDraining, EngineLost, VocabularyMismatch
from control_plane.text.errors import NoChatTemplate, TemplateFailed, TextBusy

ERROR_DOMAIN = "twinplane"

_DETAILS_KEY = "grpc-status-details-bin"
_WORKER_RETRY_SECONDS = 1.0
_MAX_QUOTED_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field by its path in the request message, e.g. sampling.top_p, and its broken rule."""

    field: str
    description: str


class EdgeError(Exception):
    """Base of what the client edge refuses."""


class InvalidRequest(EdgeError):
    """Fields of the request break their rules."""

    def __init__(self, violations: Sequence[FieldViolation]) -> None:
        assert violations
        super().__init__("; ".join(f"{v.field}: {v.description}" for v in violations))
        self.violations = tuple(violations)


class UnknownModel(EdgeError):
    """The named model is not served."""

    def __init__(self, name: str, served: Sequence[str]) -> None:
        super().__init__(f"the model is not served; served: {', '.join(served)}")
        self.name = name
        self.served = tuple(served)


class NoModelServed(EdgeError):
    """No worker is attached, so no model answers yet."""

    def __init__(self) -> None:
        super().__init__("no model is served yet")


class RowFailed(EdgeError):
    """The worker failed on this request alone."""


class GenerationCancelled(EdgeError):
    """The request was ended on the server's side, not by its client."""

    def __init__(self) -> None:
        super().__init__("the server ended the request")


@dataclass(frozen=True, slots=True)
class Status:
    """A status with its details. `retry_after` in seconds; `quota` names what ran out."""

    code: grpc.StatusCode
    reason: str
    message: str
    violations: tuple[FieldViolation, ...] = ()
    retry_after: float | None = None
    quota: str | None = None
    metadata: dict[str, str] = field(default_factory=dict)

    def to_pb(self) -> status_pb2.Status:
        """The google.rpc.Status that goes on the wire."""
        details: list[Message] = [
            error_details_pb2.ErrorInfo(
                reason=self.reason, domain=ERROR_DOMAIN, metadata=self.metadata
            )
        ]
        if self.violations:
            details.append(
                error_details_pb2.BadRequest(
                    field_violations=[
                        error_details_pb2.BadRequest.FieldViolation(
                            field=violation.field, description=violation.description
                        )
                        for violation in self.violations
                    ]
                )
            )
        if self.retry_after is not None:
            delay = Duration()
            delay.FromNanoseconds(round(self.retry_after * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        if self.quota is not None:
            failure = error_details_pb2.QuotaFailure.Violation(
                subject=self.quota, description=self.message
            )
            details.append(error_details_pb2.QuotaFailure(violations=[failure]))
        code: int = self.code.value[0]
        status = status_pb2.Status(code=code, message=self.message)
        for detail in details:
            status.details.add().Pack(detail)
        return status


def status_of(error: Exception) -> Status | None:
    """The table. None: nobody expected this error, it is a bug of ours."""
    message = str(error)
    code = grpc.StatusCode
    match error:
        case InvalidRequest(violations=violations):
            return Status(code.INVALID_ARGUMENT, "INVALID_FIELD", message, violations=violations)
        case RequestTooLong():
            return Status(code.INVALID_ARGUMENT, "REQUEST_TOO_LONG", message)
        case TemplateFailed():
            violations = (FieldViolation("chat.messages", message),)
            return Status(code.INVALID_ARGUMENT, "TEMPLATE_FAILED", message, violations=violations)
        case NoChatTemplate():
            violations = (FieldViolation("chat", message),)
            return Status(code.INVALID_ARGUMENT, "NO_CHAT_TEMPLATE", message, violations=violations)
        case UnknownModel(name=name, served=served):
            metadata = {
                "model": name[:_MAX_QUOTED_CHARACTERS],
                "served_models": ",".join(served),
            }
            return Status(code.NOT_FOUND, "MODEL_NOT_FOUND", message, metadata=metadata)
        case DuplicateRequest():
            violations = (FieldViolation("request_id", "a request of this id is running"),)
            return Status(code.ALREADY_EXISTS, "DUPLICATE_REQUEST", message, violations=violations)
        case QueueFull(retry_after=seconds):
            return Status(
                code.RESOURCE_EXHAUSTED,
                "QUEUE_FULL",
                message,
                retry_after=seconds,
                quota="waiting requests",
            )
        case TextBusy(retry_after=seconds):
            return Status(
                code.RESOURCE_EXHAUSTED,
                "TEXT_QUEUE_FULL",
                message,
                retry_after=seconds,
                quota="waiting text work",
            )
        case NoModelServed() | EngineLost():
            return Status(code.UNAVAILABLE, "NO_WORKER", message, retry_after=_WORKER_RETRY_SECONDS)
        case EngineDraining():
            return Status(code.UNAVAILABLE, "DRAINING", message, retry_after=_WORKER_RETRY_SECONDS)
        case GenerationCancelled():
            return Status(
                code.UNAVAILABLE, "REQUEST_CANCELLED", message, retry_after=_WORKER_RETRY_SECONDS
            )
        case VocabularyMismatch():
            return Status(code.FAILED_PRECONDITION, "VOCABULARY_MISMATCH", message)
        case RowFailed():
            return Status(code.INTERNAL, "ROW_FAULT", message)
        case _:
            return None


def internal_status(error_id: str) -> Status:
    """For a bug of ours: says nothing but the id under which the log has it."""
    return Status(
        grpc.StatusCode.INTERNAL,
        "INTERNAL",
        "internal error",
        metadata={"error_id": error_id},
    )


async def abort(context: grpc.aio.ServicerContext[Message, Message], status: Status) -> NoReturn:
    """Ends the call with a rich status."""
    details = status.to_pb().SerializeToString()
    await context.abort(status.code, status.message, ((_DETAILS_KEY, details),))
