"""What the inference service refuses, and how: its engine's reasons, failed streams, limits."""

from __future__ import annotations

import logging

import grpc
import pytest

from control_plane.core.errors import QueueFull, RequestTooLong
from control_plane.core.events import FinishReason
from control_plane.shell.engine import (
    DuplicateRequest,
    EngineDraining,
    EngineLost,
    VocabularyMismatch,
)
from control_plane.shell.workers import ServingWorker, WorkerState
from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits
from tests.support.edge_rig import (
    HI,
    Edge,
    generate_request,
    ids,
    refusal_of,
    refused,
    running_edge,
)
from tests.support.gate import Gate
from twinplane.inference.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    CompleteRequest,
    DetokenizeRequest,
    ListModelsRequest,
    TokenizeRequest,
)

REFUSALS = {
    "queue": (
        QueueFull("9 requests wait", 2.5),
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "QUEUE_FULL",
        2.5,
    ),
    "duplicate": (
        DuplicateRequest("this id runs"),
        grpc.StatusCode.ALREADY_EXISTS,
        "DUPLICATE_REQUEST",
        None,
    ),
    "length": (
        RequestTooLong("at most 5 tokens"),
        grpc.StatusCode.INVALID_ARGUMENT,
        "REQUEST_TOO_LONG",
        None,
    ),
    "drain": (EngineDraining("draining"), grpc.StatusCode.UNAVAILABLE, "DRAINING", 1.0),
    "loss": (EngineLost("gone"), grpc.StatusCode.UNAVAILABLE, "NO_WORKER", 1.0),
    "wrong model": (
        VocabularyMismatch("not the model's tokens"),
        grpc.StatusCode.FAILED_PRECONDITION,
        "VOCABULARY_MISMATCH",
        None,
    ),
}


@pytest.mark.parametrize(
    ("error", "code", "reason", "retry"), REFUSALS.values(), ids=REFUSALS.keys()
)
async def test_the_engines_refusals(
    edge: Edge, error: Exception, code: grpc.StatusCode, reason: str, retry: float | None
) -> None:
    edge.engine.refusal = error
    answer = await refusal_of(edge.stub, generate_request())
    assert (answer.code, answer.info.reason, answer.retry_seconds) == (code, reason, retry)
    assert answer.message == str(error)
    await edge.wait_counted()
    assert edge.calls == [("Generate", code.name)]
    assert not edge.engine.finished, "nothing was submitted, nothing is freed"


async def test_no_worker_yet(edge: Edge) -> None:
    edge.engine.model = None
    for request in (
        generate_request(),
        TokenizeRequest(text="a"),
        DetokenizeRequest(token_ids=[1]),
    ):
        answer = await refusal_of(edge.stub, request)
        assert answer.code is grpc.StatusCode.UNAVAILABLE
        assert answer.retry_seconds == 1.0
        assert answer.message == "no model is served yet: no worker has come"
    assert (await edge.stub.ListModels(ListModelsRequest())).models == []


async def test_a_worker_that_is_away(edge: Edge) -> None:
    edge.engine.model = None
    for seconds, said in ((0.4, "1 s"), (12.4, "12 s"), (3600.0, "3600 s")):
        edge.workers[:] = [ServingWorker(WorkerState.AWAY, away_seconds=seconds)]
        for request in (
            generate_request(),
            CompleteRequest(text="a"),
            TokenizeRequest(text="a"),
            DetokenizeRequest(token_ids=[1]),
        ):
            answer = await refusal_of(edge.stub, request)
            assert (answer.info.reason, answer.retry_seconds) == ("NO_WORKER", 1.0)
            assert answer.message == f"no model is served: its worker has been away for {said}"


@pytest.mark.parametrize(
    ("end", "code", "reason"),
    [
        (FinishReason.FAULT, grpc.StatusCode.INTERNAL, "ROW_FAULT"),
        (FinishReason.CANCELLED, grpc.StatusCode.UNAVAILABLE, "REQUEST_CANCELLED"),
    ],
)
async def test_ends_that_are_no_answer(
    edge: Edge, end: FinishReason, code: grpc.StatusCode, reason: str
) -> None:
    call = edge.stub.Generate(generate_request())
    await edge.engine.stream()
    edge.engine.push(ids("ab", edge), edge.engine.end(end, 2))
    text = ""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in call:
            text += response.delta.text
    assert text == "ab", "what came before the end is not lost"
    answer = refused(caught.value)
    assert (answer.code, answer.info.reason) == (code, reason)
    assert not edge.engine.finished


async def test_a_failed_stream(edge: Edge) -> None:
    call = edge.stub.Generate(generate_request())
    stream = await edge.engine.stream()
    edge.engine.push(ids("ab", edge))
    stream.fail(EngineDraining("the server has shut down"))
    text = ""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in call:
            text += response.delta.text
    assert text == "ab"
    assert refused(caught.value).info.reason == "DRAINING"
    assert not edge.engine.finished


async def test_bugs_of_ours_tell_the_client_an_id_and_the_log_no_prompt(
    edge: Edge, caplog: pytest.LogCaptureFixture
) -> None:
    edge.engine.refusal = KeyError("the secret prompt")
    with caplog.at_level(logging.ERROR):
        answer = await refusal_of(edge.stub, generate_request(text="the secret prompt"))
    assert answer.code is grpc.StatusCode.INTERNAL
    assert answer.message == "internal error"
    assert answer.info.metadata == {"error_id": "error-1"}
    [record] = [record for record in caplog.records if record.name.startswith("twinplane.grpc")]
    logged = vars(record)["fields"]
    assert logged["error_id"] == "error-1"
    assert logged["request_id"] == "made-1"
    assert logged["error_type"] == "KeyError"
    assert "edge_rig.py" in logged["where"]
    assert "secret" not in f"{vars(record)}"


async def test_busy_text_work(tiny_text: TextModel) -> None:
    gate = Gate()
    limits = TextLimits(thread_count=1, max_pending=1)
    async with running_edge(tiny_text, limits, gate) as edge:
        call = edge.stub.Generate(generate_request(chat=HI))
        await gate.wait_entered()
        answer = await refusal_of(edge.stub, generate_request(chat=HI))
        assert answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert answer.info.reason == "TEXT_QUEUE_FULL"
        assert answer.retry_seconds == 1.0
        gate.open()
        await call.read()
        call.cancel()


async def test_text_limits_name_their_field(tiny_text: TextModel) -> None:
    async with running_edge(tiny_text, TextLimits(max_characters=50)) as edge:
        answer = await refusal_of(edge.stub, generate_request(text="a" * 51))
        assert answer.fields == ["text"]
        turn = ChatMessage(role="user", content="a" * 30)
        answer = await refusal_of(edge.stub, generate_request(chat=Chat(messages=[turn])))
        assert answer.fields == ["chat.messages"]
        assert answer.info.reason == "TEMPLATE_FAILED"
