"""Both clients over a loopback server: what they send, what they answer, what they raise."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

import twinplane
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
    AsyncClient,
    Client,
    FinishReason,
    GenerationResult,
    Message,
    RetryPolicy,
    ServedModel,
    TlsCredentials,
    Usage,
    Violation,
    WeightVersion,
)
from twinplane.inference.v1 import inference_pb2 as pb

Call = Callable[..., Any]


def _blocking(address: str, method: str, *args: Any, sleeps: list[float], **kwargs: Any) -> Any:
    settings = kwargs.pop("client", {})
    with Client(address, sleep=sleeps.append, jitter=lambda: 0.5, **settings) as client:
        answer = getattr(client, method)(*args, **kwargs)
        return answer.result() if method == "generate" else answer


def _asynchronous(address: str, method: str, *args: Any, sleeps: list[float], **kwargs: Any) -> Any:
    settings = kwargs.pop("client", {})

    async def sleep(seconds: float) -> None:
        sleeps.append(seconds)

    async def run() -> Any:
        async with AsyncClient(address, sleep=sleep, jitter=lambda: 0.5, **settings) as client:
            answer = getattr(client, method)(*args, **kwargs)
            return await (answer.result() if method == "generate" else answer)

    return asyncio.run(run())


@pytest.fixture
def service() -> ScriptedInference:
    return ScriptedInference()


@pytest.fixture
def sleeps() -> list[float]:
    return []


@pytest.fixture(params=[_blocking, _asynchronous], ids=["sync", "async"])
def call(
    request: pytest.FixtureRequest, service: ScriptedInference, sleeps: list[float]
) -> Iterator[Call]:
    with serve(service) as address:
        yield lambda *args, **kwargs: request.param(address, *args, sleeps=sleeps, **kwargs)


def test_result_carries_everything_the_stream_said(call: Call, service: ScriptedInference) -> None:
    end = finished(
        reason=pb.FINISH_REASON_STOP,
        stop_string="!",
        usage={
            "prompt_token_count": 3,
            "cached_prompt_token_count": 2,
            "completion_token_count": 4,
        },
    )
    service.scripts.append([started(), delta("Hel", 1, 2), delta("", 3), delta("lo", 4), end])
    assert call("generate", "Say hello") == GenerationResult(
        text="Hello",
        token_ids=(1, 2, 3, 4),
        finish_reason=FinishReason.STOP,
        stop_string="!",
        stop_token_id=None,
        usage=Usage(3, 2, 4),
        seed=7,
        request_id="r-1",
        model="m",
    )


def test_stop_token_zero_is_told_from_none(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished(reason=pb.FINISH_REASON_STOP, stop_token_id=0)])
    result = call("generate", "x")
    assert (result.stop_token_id, result.stop_string) == (0, None)


def test_unset_arguments_stay_unset_on_the_wire(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished()])
    call("generate", "x")
    (request,) = service.requests
    expected = pb.GenerateRequest(text="x", sampling={}, stop={})
    assert request == expected
    assert service.time_left[0] is None or service.time_left[0] > 1e6


def test_every_argument_reaches_its_field(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished()])
    call(
        "generate",
        [5, 0, 6],
        model="m",
        max_tokens=9,
        temperature=0.0,
        top_k=0,
        top_p=0.5,
        min_p=0.25,
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[0, 2],
        ignore_eos=True,
        priority=-3,
        cache_salt="tenant",
        request_id="mine",
        timeout=30.0,
    )
    (request,) = service.requests
    assert request == pb.GenerateRequest(
        model="m",
        token_ids={"ids": [5, 0, 6]},
        sampling={"temperature": 0.0, "top_k": 0, "top_p": 0.5, "min_p": 0.25, "seed": 2**64 - 1},
        stop={
            "max_tokens": 9,
            "strings": ["a", "b"],
            "token_ids": [0, 2],
            "ignore_end_of_sequence": True,
        },
        priority=-3,
        cache_salt="tenant",
        request_id="mine",
    )
    assert 0 < service.time_left[0] < 35


def test_conversation_is_sent_as_a_chat(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished()])
    call("generate", [Message("system", "Be brief."), Message("user", "Hi")])
    (request,) = service.requests
    assert request.chat == pb.Chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
        ]
    )


def test_no_tokens_is_still_the_token_form(call: Call, service: ScriptedInference) -> None:
    service.scripts.append([started(), finished()])
    call("generate", [])
    assert service.requests[0].WhichOneof("prompt") == "token_ids"


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        ({"max_tokens": -1}, "stop.max_tokens"),
        ({"max_tokens": 2**32}, "stop.max_tokens"),
        ({"top_k": -1}, "sampling.top_k"),
        ({"seed": 2**64}, "sampling.seed"),
        ({"seed": -1}, "sampling.seed"),
        ({"priority": 2**31}, "priority"),
        ({"stop_token_ids": [1, -1]}, "stop.token_ids[1]"),
        ({"stop": ["ok", "\ud800"]}, "stop.strings[1]"),
        ({"prompt": "\ud800"}, "text"),
        ({"prompt": [1, -2]}, "token_ids.ids[1]"),
        ({"prompt": [Message("user", "\ud800")]}, "chat.messages[0].content"),
    ],
)
def test_what_no_message_can_carry_is_an_invalid_request(
    call: Call, service: ScriptedInference, arguments: dict[str, Any], path: str
) -> None:
    with pytest.raises(twinplane.InvalidRequest) as caught:
        call("generate", **{"prompt": "x", **arguments})
    assert [violation.field for violation in caught.value.violations] == [path]
    assert service.requests == []


@pytest.mark.parametrize("prompt", [b"bytes", [1, "two"], [Message("user", "x"), 3], 5, [1.5]])
def test_prompt_of_another_type_is_a_type_error(call: Call, prompt: Any) -> None:
    with pytest.raises(TypeError):
        call("generate", prompt)


def test_one_string_as_stop_is_a_type_error(call: Call) -> None:
    with pytest.raises(TypeError, match="sequence of strings"):
        call("generate", "x", stop="end")


def test_tokenize_text_and_chat(call: Call, service: ScriptedInference) -> None:
    assert call("tokenize", "abc", model="m", add_special_tokens=False) == (1, 2, 3)
    assert call("tokenize", [Message("user", "abc")]) == (1, 2, 3)
    assert service.requests == [
        pb.TokenizeRequest(model="m", text="abc", omit_special_tokens=True),
        pb.TokenizeRequest(chat={"messages": [{"role": "user", "content": "abc"}]}),
    ]
    with pytest.raises(TypeError):
        call("tokenize", [1, 2])


def test_detokenize(call: Call, service: ScriptedInference) -> None:
    assert call("detokenize", [4, 5], model="m", keep_special_tokens=True) == "one two"
    assert service.requests == [
        pb.DetokenizeRequest(model="m", token_ids=[4, 5], keep_special_tokens=True)
    ]


def test_list_models(call: Call) -> None:
    assert call("list_models") == (ServedModel("m", 64, 9, True, WeightVersion(1, "ab")),)


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
        (grpc.StatusCode.UNIMPLEMENTED, twinplane.InternalError),
    ],
)
@pytest.mark.parametrize("method", ["generate", "tokenize"])
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


def test_nobody_listens(sleeps: list[float]) -> None:
    for caller in (_blocking, _asynchronous):
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


@pytest.mark.parametrize("caller", [_blocking, _asynchronous], ids=["sync", "async"])
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
