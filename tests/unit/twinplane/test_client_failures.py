"""Both clients when calls fail: errors, deadlines, retries, TLS."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

import twinplane
from tests.support.client_callers import Call, asynchronous, blocking
from tests.support.scripted_inference import (
    Fail,
    ScriptedInference,
    delta,
    finished,
    retry_info,
    serve,
    started,
)
from twinplane import (
    FinishReason,
    RetryPolicy,
    TlsCredentials,
    Violation,
)
from twinplane.inference.v1 import inference_pb2 as pb

# --- errors -----------------------------------------------------------------------------------

NO_RETRY = {"retry": RetryPolicy(max_attempts=1)}


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, twinplane.InvalidRequest),
        (grpc.StatusCode.ALREADY_EXISTS, twinplane.InvalidRequest),
        (grpc.StatusCode.NOT_FOUND, twinplane.ModelNotFound),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, twinplane.Overloaded),
        (grpc.StatusCode.UNAVAILABLE, twinplane.Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, twinplane.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, twinplane.Cancelled),
        (grpc.StatusCode.INTERNAL, twinplane.InternalError),
        (grpc.StatusCode.UNKNOWN, twinplane.InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, twinplane.WrongServer),
    ],
)
@pytest.mark.parametrize("method", ["generate", "complete", "tokenize"])
def test_each_code_has_its_error(
    call: Call,
    service: ScriptedInference,
    method: str,
    code: grpc.StatusCode,
    error: type[twinplane.TwinplaneError],
) -> None:
    service.failures.append(Fail(code, "what happened"))
    with pytest.raises(error, match="what happened") as caught:
        call(method, "x", client=NO_RETRY)
    assert type(caught.value) is error
    assert caught.value.retry_after is None


def test_error_details_are_unpacked(call: Call, service: ScriptedInference) -> None:
    info = error_details_pb2.ErrorInfo(
        reason="INVALID_REQUEST", domain="twinplane", metadata={"limit": "64"}
    )
    bad = error_details_pb2.BadRequest(
        field_violations=[{"field": "sampling.top_p", "description": "must be in (0, 1]"}]
    )
    service.failures.append(Fail(grpc.StatusCode.INVALID_ARGUMENT, details=(info, bad)))
    with pytest.raises(twinplane.InvalidRequest) as caught:
        call("generate", "x")
    assert caught.value.reason == "INVALID_REQUEST"
    assert caught.value.metadata == {"limit": "64"}
    assert caught.value.violations == (Violation("sampling.top_p", "must be in (0, 1]"),)


def test_overload_says_when_to_come_back(call: Call, service: ScriptedInference) -> None:
    service.failures.append(Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, details=(retry_info(1.5),)))
    with pytest.raises(twinplane.Overloaded) as caught:
        call("generate", "x", client=NO_RETRY)
    assert caught.value.retry_after == 1.5


@pytest.mark.parametrize(
    "script",
    [
        [started(), delta("a", 1)],
        [delta("a", 1)],
        [finished()],
        [started(), started()],
        [started(), finished(), delta("late", 1)],
    ],
    ids=["no end", "no start", "only an end", "two starts", "after the end"],
)
def test_a_server_that_breaks_the_contract_is_an_internal_error(
    call: Call, service: ScriptedInference, script: Any
) -> None:
    service.scripts.append(script)
    with pytest.raises(twinplane.InternalError):
        call("generate", "x")


def test_what_a_newer_server_adds_is_passed_over(call: Call, service: ScriptedInference) -> None:
    unknown_event = pb.GenerateResponse.FromString(bytes([0x7A, 0x01, 0x00]))  # field 15
    unknown_reason = pb.GenerateResponse(finished=pb.GenerationFinished())
    unknown_reason.finished.MergeFromString(bytes([0x08, 0x63]))  # reason 99
    service.scripts.append([started(), unknown_event, delta("a", 1), unknown_reason])
    result = call("generate", "x")
    assert (result.text, result.finish_reason) == ("a", FinishReason.UNKNOWN)


MANY = 5_000_000
"""Characters beyond what a server takes by gRPC's own default."""


@pytest.mark.parametrize("method", ["generate", "complete", "tokenize"])
def test_a_request_that_is_too_large_is_wrong_and_tried_once(
    call: Call, service: ScriptedInference, sleeps: list[float], method: str
) -> None:
    with pytest.raises(twinplane.InvalidRequest) as caught:
        call(method, "x" * MANY)
    assert re.fullmatch(
        r"the request has more bytes than can be sent \(50000\d\d vs\. 4194304\)", str(caught.value)
    )
    assert sleeps == []
    assert service.requests == []


def test_an_answer_that_is_too_large_says_so(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), delta("x" * 68_000_000, 1), finished()])
    with pytest.raises(twinplane.InvalidRequest, match="more bytes than this client takes"):
        call("complete", "x")


def test_nobody_listens(sleeps: list[float]) -> None:
    for caller in (blocking, asynchronous):
        with pytest.raises(twinplane.Unavailable):
            caller("127.0.0.1:1", "list_models", sleeps=sleeps, client=NO_RETRY)


# --- deadlines and retries --------------------------------------------------------------------


def test_deadline_of_the_client_holds_where_a_call_names_none(
    call: Call, service: ScriptedInference
) -> None:
    call("list_models", client={"timeout": 50.0})
    call("list_models", timeout=20.0, client={"timeout": 50.0})
    first, second = service.time_left
    assert 25 < first < 55  # gRPC rounds
    assert second < 25


@pytest.mark.parametrize("method", ["generate", "list_models"])
def test_unavailable_is_tried_again(call: Call, service: ScriptedInference, sleeps, method) -> None:
    service.failures.extend([Fail(grpc.StatusCode.UNAVAILABLE)] * 2)
    service.scripts.append([started(), delta("a", 1), finished()])
    arguments = ["x"] if method == "generate" else []
    assert call(method, *arguments, client={"retry": RetryPolicy(initial_backoff=1.0)})
    assert sleeps == [0.5, 1.0]  # jitter 0.5 of 1 and 2 seconds
    assert len(service.requests) == 3


def test_the_delay_the_server_asks_for_is_kept(
    call: Call, service: ScriptedInference, sleeps: list[float]
) -> None:
    service.failures.append(Fail(grpc.StatusCode.RESOURCE_EXHAUSTED, details=(retry_info(2.0),)))
    call("list_models")
    assert sleeps == [2.0]


@pytest.mark.parametrize(
    ("failure", "settings"),
    [
        (Fail(grpc.StatusCode.RESOURCE_EXHAUSTED), {}),
        (Fail(grpc.StatusCode.INTERNAL), {}),
        (Fail(grpc.StatusCode.INVALID_ARGUMENT), {}),
        (Fail(grpc.StatusCode.DEADLINE_EXCEEDED), {}),
        (Fail(grpc.StatusCode.UNAVAILABLE), {"retry": RetryPolicy(max_attempts=1)}),
        (Fail(grpc.StatusCode.UNAVAILABLE, details=(retry_info(11.0),)), {}),
        (Fail(grpc.StatusCode.UNAVAILABLE, details=(retry_info(6.0),)), {"timeout": 5.0}),
    ],
    ids=[
        "no hint",
        "internal",
        "invalid",
        "deadline",
        "one attempt",
        "too long a wait",
        "past the deadline",
    ],
)
@pytest.mark.parametrize("method", ["generate", "tokenize"])
def test_what_is_not_tried_again(
    call: Call,
    service: ScriptedInference,
    sleeps: list[float],
    method: str,
    failure: Fail,
    settings: dict[str, Any],
) -> None:
    service.failures.append(failure)
    with pytest.raises(twinplane.TwinplaneError):
        call(method, "x", client=settings)
    assert len(service.requests) == 1
    assert sleeps == []


def test_attempts_are_bounded(call: Call, service: ScriptedInference, sleeps: list[float]) -> None:
    service.failures.extend([Fail(grpc.StatusCode.UNAVAILABLE)] * 9)
    with pytest.raises(twinplane.Unavailable):
        call("generate", "x", client={"retry": RetryPolicy(max_attempts=3)})
    assert len(service.requests) == 3
    assert len(sleeps) == 2


@pytest.mark.parametrize("said", [[started()], [started(), delta("a", 1)]])
def test_a_generation_that_began_is_never_tried_again(
    call: Call, service: ScriptedInference, sleeps: list[float], said: Any
) -> None:
    service.scripts.append([*said, Fail(grpc.StatusCode.UNAVAILABLE)])
    with pytest.raises(twinplane.Unavailable):
        call("generate", "x")
    assert len(service.requests) == 1
    assert sleeps == []


# --- TLS --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A key and a certificate of itself for 127.0.0.1, made now so that it never expires."""
    folder = tmp_path_factory.mktemp("tls")
    key, chain = folder / "key.pem", folder / "chain.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-keyout", key, "-out", chain, "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return key, chain


@pytest.mark.parametrize("caller", [blocking, asynchronous], ids=["sync", "async"])
def test_tls_on_both_sides(
    service: ScriptedInference, certificate: tuple[Path, Path], caller: Call
) -> None:
    key, chain = (path.read_bytes() for path in certificate)
    server = grpc.ssl_server_credentials([(key, chain)], chain, require_client_auth=True)
    credentials = TlsCredentials.from_files(certificate[1], *certificate)
    assert "PRIVATE" not in repr(credentials)
    with serve(service, server) as address:
        answer = caller(address, "list_models", sleeps=[], client={"credentials": credentials})
        assert answer[0].name == "m"
        untrusting = {"credentials": TlsCredentials(), **NO_RETRY}
        with pytest.raises(twinplane.Unavailable):
            caller(address, "list_models", sleeps=[], client=untrusting)
