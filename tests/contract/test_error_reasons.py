"""The reasons of errors: each plane's own names are those of the contract's ErrorReason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from control_plane.core.errors import QueueFull, RequestTooLong
from control_plane.rpc.errors import (
    CODES,
    REASONS,
    GenerationCancelled,
    InvalidRequest,
    NoModelServed,
    RequestsTooLarge,
    RowFailed,
    SpoolFull,
    UnknownModel,
    status_of,
)
from control_plane.shell.engine import (
    CannotResume,
    DuplicateRequest,
    EngineDraining,
    EngineLost,
    EnginePaused,
    VocabularyMismatch,
    WeightsChanged,
)
from control_plane.shell.ports import RefusalReason
from control_plane.shell.rollouts import RolloutConflict
from control_plane.text.errors import NoChatTemplate, TemplateFailed, TextBusy
from twinplane.common.v1.errors_pb2 import ErrorReason
from twinplane.errors import Violation
from twinplane.grpc.messages import MalformedMessage, MessageTooLarge
from twinplane.grpc.status import (
    deadline_status,
    internal_status,
    message_status,
    no_method_status,
)
from worker_service.domain.errors import Reason, WorkerError

PREFIX = "ERROR_REASON_"
NAMES = ErrorReason.DESCRIPTOR.values_by_name
CONTRACT = {name.removeprefix(PREFIX) for name in NAMES} - {"UNSPECIFIED"}
WORKER = {reason.value for reason in Reason} | {"INTERNAL"}
BEFORE_ANY_SERVICE = {
    message_status(MalformedMessage("not a message", "")).reason,
    message_status(MessageTooLarge("too large")).reason,
    deadline_status().reason,
    no_method_status("/a/b", ()).reason,
}

EDGE_ERRORS = (
    InvalidRequest([Violation("text", "must not be empty")]),
    RequestTooLong("at most 5 tokens"),
    TemplateFailed("the template broke"),
    NoChatTemplate("none"),
    UnknownModel("a", ["b"]),
    NoModelServed(),
    RolloutConflict("another rollout runs"),
    SpoolFull(2, 1),
    RequestsTooLarge(9),
    DuplicateRequest("this id runs"),
    QueueFull("9 requests wait", 2.5),
    TextBusy(1.0),
    EngineLost("gone"),
    EngineDraining("draining"),
    EnginePaused("paused"),
    WeightsChanged("exchanged"),
    VocabularyMismatch("not the model's tokens"),
    GenerationCancelled(),
    RowFailed("NaN"),
    CannotResume("weights"),
)


def edge_reasons() -> set[str]:
    statuses = [status_of(error) for error in EDGE_ERRORS]
    assert None not in statuses
    return {status.reason for status in statuses if status} | {internal_status("id").reason}


def test_the_metrics_know_every_code_from_the_start() -> None:
    codes = {status.code.name for error in EDGE_ERRORS if (status := status_of(error))}
    assert codes <= set(CODES)


def test_the_metrics_know_every_reason_from_the_start() -> None:
    """But that of a method that is not there: such calls are not counted."""
    assert (edge_reasons() | BEFORE_ANY_SERVICE) - {"METHOD_NOT_FOUND"} == set(REASONS)


def leaves(kind: type[WorkerError]) -> Iterator[type[WorkerError]]:
    """The errors that are raised: those without errors below them."""
    below = kind.__subclasses__()
    if not below:
        yield kind
    for error in below:
        yield from leaves(error)


def test_the_planes_use_every_reason_of_the_contract_and_no_other() -> None:
    assert edge_reasons() | WORKER | BEFORE_ANY_SERVICE == CONTRACT


def test_what_a_controller_knows_is_what_a_worker_says() -> None:
    assert {reason.value for reason in RefusalReason} - {"UNKNOWN"} == WORKER
    assert all(reason.name == reason.value for reason in (*RefusalReason, *Reason))


def test_a_reason_that_a_controller_does_not_know_is_said_to_be_so() -> None:
    assert RefusalReason("STALE_EPOCH") is RefusalReason.STALE_EPOCH
    assert RefusalReason("A_NEWER_WORKERS") is RefusalReason.UNKNOWN
    assert "UNKNOWN" not in CONTRACT


def test_each_error_that_a_worker_raises_has_a_reason_of_its_own() -> None:
    reasons = [error.reason for error in leaves(WorkerError)]
    assert sorted(reasons) == sorted(Reason)


@pytest.mark.parametrize("name", sorted(CONTRACT))
def test_names_keep_the_form_that_error_info_asks_for(name: str) -> None:
    assert len(name) <= 63
    assert name.replace("_", "").isalnum() and name.isupper()
