"""Errors as statuses: the one table from what can go wrong to code, reason and details.

The edge's own errors:

EdgeError
├── InvalidRequest       fields break their rules: names each
├── UnknownModel         no model of this name is served: lists those that are
├── NoModelServed        no worker is attached yet, or it is away
├── RequestsTooLarge     requests that are looked at are too large together: try again soon
├── SpoolFull            streamed weights have no room on the disk
├── RowFailed            the worker could not compute this request's next token
└── GenerationCancelled  the server ended the request

Messages never hold a prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc

from control_plane.core.errors import QueueFull, RequestTooLong
from control_plane.shell.engine import (
    CannotResume,
    DuplicateRequest,
    EngineDraining,
    EngineLost,
    EnginePaused,
    VocabularyMismatch,
    WeightsChanged,
)
from control_plane.shell.rollouts import RolloutConflict
from control_plane.text.errors import (
    ControlTokenWritten,
    NoChatTemplate,
    TemplateFailed,
    TextBusy,
)
from twinplane.common.v1 import errors_pb2 as reasons
from twinplane.errors import Violation
from twinplane.grpc.status import Status, reason_name

CODES: tuple[str, ...] = (
    *("OK", "INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS", "FAILED_PRECONDITION"),
    *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "INTERNAL", "CANCELLED", "DEADLINE_EXCEEDED"),
    "ABORTED",
)
"""How the clients' RPCs end: by this table, well, by a bug of ours, or by their client."""

REASONS: tuple[str, ...] = tuple(
    reason_name(reason)
    for reason in (
        reasons.ERROR_REASON_INVALID_FIELD,
        reasons.ERROR_REASON_REQUEST_TOO_LONG,
        reasons.ERROR_REASON_TEMPLATE_FAILED,
        reasons.ERROR_REASON_NO_CHAT_TEMPLATE,
        reasons.ERROR_REASON_MODEL_NOT_FOUND,
        reasons.ERROR_REASON_DUPLICATE_REQUEST,
        reasons.ERROR_REASON_QUEUE_FULL,
        reasons.ERROR_REASON_TEXT_QUEUE_FULL,
        reasons.ERROR_REASON_NO_WORKER,
        reasons.ERROR_REASON_DRAINING,
        reasons.ERROR_REASON_REQUEST_CANCELLED,
        reasons.ERROR_REASON_VOCABULARY_MISMATCH,
        reasons.ERROR_REASON_ROW_FAULT,
        reasons.ERROR_REASON_CANNOT_RESUME,
        reasons.ERROR_REASON_PAUSED,
        reasons.ERROR_REASON_WEIGHTS_CHANGED,
        reasons.ERROR_REASON_ROLLOUT_CONFLICT,
        reasons.ERROR_REASON_OUT_OF_MEMORY,
        reasons.ERROR_REASON_INTERNAL,
        reasons.ERROR_REASON_MALFORMED_MESSAGE,
        reasons.ERROR_REASON_MESSAGE_TOO_LARGE,
        reasons.ERROR_REASON_DEADLINE_PASSED,
    )
)
"""What the errors of the clients' RPCs give as their reason."""

_WORKER_RETRY_SECONDS = 1.0
_TEXT_RETRY_SECONDS = 1.0
_MAX_QUOTED_CHARACTERS = 128


class EdgeError(Exception):
    """Base of what the client edge refuses."""


class InvalidRequest(EdgeError):
    """Fields of the request break their rules."""

    def __init__(self, violations: Sequence[Violation]) -> None:
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
    """No worker is attached, so no model answers now.

    `away_seconds`: for how long the one that was attached has been away; 0 where none was.
    """

    def __init__(self, away_seconds: float = 0.0) -> None:
        super().__init__(
            f"no model is served: its worker has been away for {max(1, round(away_seconds))} s"
            if away_seconds
            else "no model is served yet: no worker has come"
        )


class RequestsTooLarge(EdgeError):
    """The requests whose text waits to become tokens have too many bytes together."""

    def __init__(self, held_bytes: int) -> None:
        super().__init__(f"requests of {held_bytes} bytes wait to be tokenized")


class SpoolFull(EdgeError):
    """The disk has no room for the weights that an operator streams."""

    def __init__(self, needed: int, free: int) -> None:
        super().__init__(f"the weights have {needed:,} bytes, and the disk has {free:,} free")


class RowFailed(EdgeError):
    """The worker failed on this request alone."""


class GenerationCancelled(EdgeError):
    """The request was ended on the server's side, not by its client."""

    def __init__(self) -> None:
        super().__init__("the server ended the request")


def status_of(error: Exception) -> Status | None:
    """The table. None: nobody expected this error, it is a bug of ours."""
    message = str(error)
    match error:
        case InvalidRequest(violations=violations):
            return _invalid(reasons.ERROR_REASON_INVALID_FIELD, message, *violations)
        case RequestTooLong():
            return _invalid(reasons.ERROR_REASON_REQUEST_TOO_LONG, message)
        case TemplateFailed():
            violation = Violation("chat.messages", message)
            return _invalid(reasons.ERROR_REASON_TEMPLATE_FAILED, message, violation)
        case ControlTokenWritten(written=written):
            path = "" if written is None else f"[{written.index}].{written.field}"
            violation = Violation(f"chat.messages{path}", message)
            description = f"{violation.field} {message}"
            return _invalid(reasons.ERROR_REASON_INVALID_FIELD, description, violation)
        case NoChatTemplate():
            violation = Violation("chat", message)
            return _invalid(reasons.ERROR_REASON_NO_CHAT_TEMPLATE, message, violation)
        case UnknownModel(name=name, served=served):
            reason = reason_name(reasons.ERROR_REASON_MODEL_NOT_FOUND)
            metadata = {
                "model": name[:_MAX_QUOTED_CHARACTERS],
                "served_models": ",".join(served),
            }
            return Status(grpc.StatusCode.NOT_FOUND, reason, message, metadata=metadata)
        case DuplicateRequest():
            reason = reason_name(reasons.ERROR_REASON_DUPLICATE_REQUEST)
            violations = (Violation("request_id", "a request of this id is running"),)
            return Status(grpc.StatusCode.ALREADY_EXISTS, reason, message, violations=violations)
        case QueueFull(retry_after=seconds):
            return _full(reasons.ERROR_REASON_QUEUE_FULL, message, seconds, "waiting requests")
        case TextBusy(retry_after=seconds):
            quota = "waiting text work"
            return _full(reasons.ERROR_REASON_TEXT_QUEUE_FULL, message, seconds, quota)
        case RequestsTooLarge():
            quota = "bytes of waiting requests"
            return _full(reasons.ERROR_REASON_TEXT_QUEUE_FULL, message, _TEXT_RETRY_SECONDS, quota)
        case NoModelServed() | EngineLost():
            return _unavailable(reasons.ERROR_REASON_NO_WORKER, message)
        case EnginePaused():
            return _unavailable(reasons.ERROR_REASON_PAUSED, message)
        case WeightsChanged():
            reason = reason_name(reasons.ERROR_REASON_WEIGHTS_CHANGED)
            return Status(grpc.StatusCode.ABORTED, reason, message)
        case RolloutConflict(rollout=rollout):
            reason = reason_name(reasons.ERROR_REASON_ROLLOUT_CONFLICT)
            code = grpc.StatusCode.FAILED_PRECONDITION
            if rollout is None:
                return Status(code, reason, message)
            metadata = {"rollout_id": rollout.rollout_id, "state": rollout.state.name}
            return Status(code, reason, message, metadata=metadata)
        case SpoolFull():
            reason = reason_name(reasons.ERROR_REASON_OUT_OF_MEMORY)
            code = grpc.StatusCode.RESOURCE_EXHAUSTED
            return Status(code, reason, message, quota="bytes on the control plane's disk")
        case EngineDraining():
            return _unavailable(reasons.ERROR_REASON_DRAINING, message)
        case GenerationCancelled():
            return _unavailable(reasons.ERROR_REASON_REQUEST_CANCELLED, message)
        case VocabularyMismatch():
            reason = reason_name(reasons.ERROR_REASON_VOCABULARY_MISMATCH)
            return Status(grpc.StatusCode.FAILED_PRECONDITION, reason, message)
        case CannotResume(differs=differs):
            reason = reason_name(reasons.ERROR_REASON_CANNOT_RESUME)
            metadata = {"differs": ",".join(differs)}
            return Status(grpc.StatusCode.FAILED_PRECONDITION, reason, message, metadata=metadata)
        case RowFailed():
            reason = reason_name(reasons.ERROR_REASON_ROW_FAULT)
            return Status(grpc.StatusCode.INTERNAL, reason, message)
        case _:
            return None


def _invalid(reason: reasons.ErrorReason, message: str, *violations: Violation) -> Status:
    code = grpc.StatusCode.INVALID_ARGUMENT
    return Status(code, reason_name(reason), message, violations=violations)


def _full(reason: reasons.ErrorReason, message: str, retry_after: float, quota: str) -> Status:
    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    # Rounded, so that many answers are alike: they are made once.
    seconds = round(retry_after, 1)
    return Status(code, reason_name(reason), message, retry_after=seconds, quota=quota)


def _unavailable(reason: reasons.ErrorReason, message: str) -> Status:
    code = grpc.StatusCode.UNAVAILABLE
    return Status(code, reason_name(reason), message, retry_after=_WORKER_RETRY_SECONDS)
