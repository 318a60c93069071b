"""Complete: the unary form of Generate, over a loopback server."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.shell.engine import EngineDraining, EngineLost
from tests.support.edge_rig import HI, Edge, ids, refusal_of, refused
from twinplane.common.v1.types_pb2 import SamplingParameters, TokenIds
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1.inference_pb2 import CompleteRequest, CompleteResponse, GenerateRequest

END = 256


def test_both_requests_have_the_same_fields() -> None:
    def shape(message: type[GenerateRequest] | type[CompleteRequest]) -> list[object]:
        return [
            (field.number, field.name, field.type, field.is_repeated, field.has_presence,
             field.message_type and field.message_type.full_name,
             field.containing_oneof and field.containing_oneof.name)
            for field in message.DESCRIPTOR.fields
        ]  # fmt: skip

    assert shape(CompleteRequest) == shape(GenerateRequest)


async def test_an_answer_is_whole(edge: Edge) -> None:
    request = CompleteRequest(text="hé", request_id="mine", sampling={"seed": 9})
    answer = asyncio.create_task(_complete(edge, request))
    await edge.engine.stream()
    tokens = ids("Größe €", edge)
    for token in tokens[:-1]:
        edge.engine.push([token])
        await asyncio.sleep(0)
    edge.engine.push(
        tokens[-1:], Finish(FinishReason.LENGTH, Usage(3, 2, len(tokens)), arithmetic_changed=True)
    )
    assert await answer == CompleteResponse(
        text="Größe €",
        token_ids=tokens,
        reason=pb.FINISH_REASON_LENGTH,
        usage={
            "prompt_token_count": 3,
            "cached_prompt_token_count": 2,
            "completion_token_count": len(tokens),
        },
        seed=9,
        request_id="mine",
        model="tiny",
        arithmetic_changed=True,
    )
    await edge.wait_counted()
    assert edge.calls == [("Complete", "OK")]
    assert edge.engine.finished == []
    assert edge.door.held_bytes == edge.engine.reserved == 0


@pytest.mark.parametrize(
    ("request_fields", "tokens", "end", "matched"),
    [
        ({"stop": {"strings": ["ll"]}}, "hello", None, ("stop_string", "ll")),
        ({"stop": {"token_ids": [0]}}, "h", 0, ("stop_token_id", 0)),
        ({}, "h", None, None),
    ],
    ids=["stop string", "stop token zero", "end of sequence"],
)
async def test_what_stopped_it(
    edge: Edge, request_fields: dict[str, object], tokens: str, end: int | None, matched: object
) -> None:
    answer = asyncio.create_task(_complete(edge, CompleteRequest(text="hi", **request_fields)))
    await edge.engine.stream()
    count = len(ids(tokens, edge))
    edge.engine.push(
        ids(tokens, edge), edge.engine.end(FinishReason.STOP, count, stop_token_id=end)
    )
    response = await answer
    which = response.WhichOneof("matched")
    assert (which and (which, getattr(response, which))) == matched
    assert response.reason == pb.FINISH_REASON_STOP


WRONG = [
    ({}, ["prompt"]),
    ({"text": ""}, ["text"]),
    ({"text": "x", "sampling": {"top_p": 7, "min_p": 2}}, ["sampling.min_p", "sampling.top_p"]),
    ({"text": "x", "stop": {"max_tokens": 0}}, ["stop.max_tokens"]),
    ({"text": "x", "stop": {"max_tokens": 10_000}}, ["stop.max_tokens"]),
    ({"text": "x", "stop": {"strings": [""]}}, ["stop.strings[0]"]),
    ({"text": "x", "priority": 101}, ["priority"]),
    ({"text": "x", "cache_salt": "s" * 129}, ["cache_salt"]),
    ({"text": "x", "request_id": "é"}, ["request_id"]),
    ({"token_ids": {"ids": [300]}}, ["token_ids"]),
    ({"chat": {}}, ["chat.messages"]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "paths"), WRONG)
async def test_it_refuses_what_generate_refuses(
    edge: Edge, fields: dict[str, object], paths: list[str]
) -> None:
    streamed = await refusal_of(edge.stub, GenerateRequest(**fields))
    whole = await refusal_of(edge.stub, CompleteRequest(**fields))
    assert sorted(whole.fields) == sorted(streamed.fields) == paths
    assert (whole.code, whole.message, whole.info) == (
        streamed.code, streamed.message, streamed.info,
    )  # fmt: skip
    assert edge.engine.requests == []


async def test_fields_of_a_newer_contract_are_refused(edge: Edge) -> None:
    newer = CompleteRequest(text="x")
    newer.MergeFromString(b"\x98\x06\x01")  # field 99
    assert (await refusal_of(edge.stub, newer)).fields == ["99"]


async def test_all_kinds_of_prompt_reach_the_engine(edge: Edge) -> None:
    prompts: list[dict[str, object]] = [
        {"text": "hi"}, {"token_ids": TokenIds(ids=[5, 6])}, {"chat": HI},
    ]  # fmt: skip
    for prompt in prompts:
        edge.engine.submitted.clear()
        request = CompleteRequest(sampling=SamplingParameters(temperature=0), **prompt)
        answer = asyncio.create_task(_complete(edge, request))
        await edge.engine.stream()
        edge.engine.push([104], edge.engine.end(FinishReason.LENGTH, 1))
        assert (await answer).text
    assert list(edge.engine.requests[1].prompt_token_ids) == [5, 6]


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (EngineLost("gone"), grpc.StatusCode.UNAVAILABLE, "NO_WORKER"),
        (EngineDraining("stops"), grpc.StatusCode.UNAVAILABLE, "DRAINING"),
    ],
)
async def test_a_generation_that_fails_has_no_answer(
    edge: Edge, error: Exception, code: grpc.StatusCode, reason: str
) -> None:
    answer = asyncio.create_task(_complete(edge, CompleteRequest(text="hi")))
    stream = await edge.engine.stream()
    edge.engine.push(ids("some", edge))
    stream.fail(error)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    assert (caught.value.code(), refused(caught.value).info.reason) == (code, reason)
    assert edge.engine.finished == []


async def test_a_client_that_leaves_frees_everything(edge: Edge) -> None:
    answer = asyncio.create_task(_complete(edge, CompleteRequest(text="hi", request_id="left")))
    await edge.engine.stream()
    edge.engine.push(ids("so", edge))
    answer.cancel()
    async with asyncio.timeout(60):
        await edge.engine.freed.wait()
    assert edge.engine.finished == [("left", FinishReason.CANCELLED)]
    await edge.wait_counted()
    assert edge.calls == [("Complete", "CANCELLED")]


async def test_a_full_queue_refuses_at_the_door(edge: Edge) -> None:
    edge.engine.places = 0
    refusal = await refusal_of(edge.stub, CompleteRequest(text="hi"))
    assert (refusal.info.reason, refusal.retry_seconds) == ("QUEUE_FULL", 2.5)


async def _complete(edge: Edge, request: CompleteRequest) -> CompleteResponse:
    return await edge.stub.Complete(request)
