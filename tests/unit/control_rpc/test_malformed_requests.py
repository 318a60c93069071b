"""Bytes that are no request, through a real server: refused by name, counted, told in one line."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2

from tests.support.edge_rig import HI, Edge, generate_request, ids, refused
from tests.support.malformed import broken, field
from twinplane.grpc import interceptors
from twinplane.inference.v1 import inference_pb2 as pb

SERVICE = "/twinplane.inference.v1.InferenceService"
WHOLE: dict[str, Message] = {
    "Generate": pb.GenerateRequest(
        text="some text",
        model="text",
        request_id="text-1",
        cache_salt="text",
        stop=pb.StopConditions(strings=["text", "a"], token_ids=[1, 2, 300], max_tokens=7),
    ),
    "Tokenize": pb.TokenizeRequest(chat=HI, model="text"),
    "Detokenize": pb.DetokenizeRequest(token_ids=[1, 2, 300], model="text"),
    "ListModels": pb.ListModelsRequest(),
}
BAD_TEXT = b"\xff\xfe"
BY_HAND = {
    "text": field(pb.GenerateRequest, "text", BAD_TEXT),
    "request_id": field(pb.GenerateRequest, "request_id", BAD_TEXT),
    "stop.strings[0]": field(
        pb.GenerateRequest, "stop", field(pb.StopConditions, "strings", BAD_TEXT)
    ),
}


@pytest.fixture(autouse=True)
def many_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interceptors, "MALFORMED_LINES", 1000)


async def send(channel: grpc.aio.Channel, method: str, raw: bytes) -> grpc.aio.AioRpcError:
    """What the call with these bytes as its message ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await channel.unary_stream(f"{SERVICE}/{method}")(raw).read()
    return error.value


def told(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """The fields of the lines that tell of malformed messages; there must be no other line."""
    assert all(record.exc_info is None for record in caplog.records)
    assert {record.message for record in caplog.records} <= {"a message was malformed"}
    return [vars(record)["fields"] for record in caplog.records]


@pytest.mark.parametrize("method", WHOLE)
async def test_sixty_ways_to_break_a_request(
    edge: Edge, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    whole = WHOLE[method]
    neighbour = edge.stub.Generate(generate_request())
    await edge.engine.stream()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as channel:
        variants = list(broken(whole.SerializeToString(), type(whole), 60, seed=11))
        for raw in variants:
            answer = refused(await send(channel, method, raw))
            assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
            assert answer.info.reason == "MALFORMED_MESSAGE"
            assert len(answer.fields) == 1
            assert type(whole).DESCRIPTOR.full_name in answer.message
    await edge.wait_counted(len(variants))
    assert edge.calls == [(method, "INVALID_ARGUMENT")] * len(variants)
    assert len(told(caplog)) == len(variants)
    assert len(edge.engine.requests) == 1 and not edge.engine.finished
    edge.engine.push(ids("ab", edge))
    assert (await neighbour.read()).started.request_id == "made-1"
    assert (await neighbour.read()).delta.text == "ab"
    neighbour.cancel()


@pytest.mark.parametrize("path", BY_HAND)
async def test_the_field_to_blame_is_named_and_nothing_is_quoted(
    edge: Edge, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    secret = field(pb.GenerateRequest, "model", b"a secret")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as channel:
        answer = refused(await send(channel, "Generate", secret + BY_HAND[path]))
    assert answer.fields == [path]
    [line] = told(caplog)
    assert path in line["error"] and line["method"].endswith("Generate")
    assert "secret" not in f"{line}{answer}"


async def test_a_call_without_a_message_is_refused(edge: Edge) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as channel:
        call = channel.stream_stream(f"{SERVICE}/Generate")()
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
    answer = refused(error.value)
    assert (answer.code, answer.message) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the call has no message",
    )
    assert error_details_pb2.BadRequest in answer.details
    await edge.wait_counted()
    assert edge.calls == [("Generate", "INVALID_ARGUMENT")]


async def test_a_call_that_is_cancelled_before_its_message_is_counted(edge: Edge) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as channel:
        call = channel.stream_stream(f"{SERVICE}/Generate")()
        await edge.stub.ListModels(pb.ListModelsRequest())  # behind it on the way
        call.cancel()
        await edge.wait_counted(2)
    assert edge.calls == [("ListModels", "OK"), ("Generate", "CANCELLED")]


async def test_a_message_above_the_librarys_limit_is_counted(edge: Edge) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as channel:
        error = await send(channel, "Generate", bytes(17 << 20))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await edge.wait_counted()
    assert [method for method, _ in edge.calls] == ["Generate"]
