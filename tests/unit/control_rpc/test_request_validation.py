"""Every rule of inference.proto, over the wire: the code, and the field named."""

from __future__ import annotations

import math
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from control_plane.rpc.errors import InvalidRequest
from control_plane.rpc.validation import check_generate
from tests.support.edge_rig import MODEL, Edge, generate_request, refusal_of
from twinplane.common.v1.types_pb2 import SamplingParameters, TokenIds
from twinplane.inference.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    StopConditions,
    TokenizeRequest,
)

UNKNOWN_FIELD = b"\x98\x06\x01"  # field 99, a varint
INFINITY = math.inf
LIMIT = 32 * MODEL.max_sequence_token_count


def sampling(**fields: float) -> GenerateRequest:
    return generate_request(sampling=SamplingParameters(**fields))


def stop(**fields: object) -> GenerateRequest:
    return generate_request(stop=StopConditions(**fields))


def chat(*turns: tuple[str, str]) -> Chat:
    return Chat(messages=[ChatMessage(role=role, content=content) for role, content in turns])


def newer(message: Message) -> bytes:
    return message.SerializeToString() + UNKNOWN_FIELD


BROKEN: dict[str, tuple[Message, list[str]]] = {
    "no prompt": (GenerateRequest(), ["prompt"]),
    "empty text": (generate_request(text=""), ["text"]),
    "empty tokens": (generate_request(token_ids=TokenIds()), ["token_ids"]),
    "empty chat": (generate_request(chat=Chat()), ["chat.messages"]),
    "no role": (generate_request(chat=chat(("user", "a"), ("", "b"))), ["chat.messages[1].role"]),
    "text too long": (generate_request(text="a" * 100), ["text"]),
    "text far too long": (generate_request(text="a" * (LIMIT + 1)), ["text"]),
    "tokens too long": (generate_request(token_ids=TokenIds(ids=[1] * 100)), ["token_ids"]),
    "chat too long": (generate_request(chat=chat(("user", "a" * 100))), ["chat.messages"]),
    "chat far too long": (generate_request(chat=chat(("u", "a" * LIMIT))), ["chat.messages"]),
    "token out of vocabulary": (generate_request(token_ids=TokenIds(ids=[1, 300])), ["token_ids"]),
    "temperature below": (sampling(temperature=-0.1), ["sampling.temperature"]),
    "temperature above": (sampling(temperature=100.1), ["sampling.temperature"]),
    "temperature NaN": (sampling(temperature=math.nan), ["sampling.temperature"]),
    "temperature infinite": (sampling(temperature=INFINITY), ["sampling.temperature"]),
    "temperature -infinite": (sampling(temperature=-INFINITY), ["sampling.temperature"]),
    "top_p zero": (sampling(top_p=0.0), ["sampling.top_p"]),
    "top_p above": (sampling(top_p=1.1), ["sampling.top_p"]),
    "top_p NaN": (sampling(top_p=math.nan), ["sampling.top_p"]),
    "top_p infinite": (sampling(top_p=INFINITY), ["sampling.top_p"]),
    "min_p below": (sampling(min_p=-0.1), ["sampling.min_p"]),
    "min_p above": (sampling(min_p=1.1), ["sampling.min_p"]),
    "min_p NaN": (sampling(min_p=math.nan), ["sampling.min_p"]),
    "max_tokens zero": (stop(max_tokens=0), ["stop.max_tokens"]),
    "max_tokens beyond the room": (stop(max_tokens=99), ["stop.max_tokens"]),
    "too many stop strings": (stop(strings=["a"] * 17), ["stop.strings"]),
    "empty stop string": (stop(strings=["a", ""]), ["stop.strings[1]"]),
    "long stop string": (stop(strings=["é" * 257]), ["stop.strings[0]"]),
    "too many stop tokens": (stop(token_ids=[1] * 65), ["stop.token_ids"]),
    "stop token out of vocabulary": (stop(token_ids=[300]), ["stop.token_ids"]),
    "priority below": (generate_request(priority=-101), ["priority"]),
    "priority above": (generate_request(priority=101), ["priority"]),
    "long salt": (generate_request(cache_salt="é" * 65), ["cache_salt"]),
    "long request id": (generate_request(request_id="a" * 129), ["request_id"]),
    "request id not ASCII": (generate_request(request_id="é"), ["request_id"]),
    "request id not printable": (generate_request(request_id="a\n"), ["request_id"]),
    "several at once": (
        generate_request(text="", priority=999, stop=StopConditions(max_tokens=0)),
        ["text", "stop.max_tokens", "priority"],
    ),
    "unknown field": (GenerateRequest.FromString(newer(generate_request())), ["99"]),
    "unknown field in tokens": (
        generate_request(token_ids=TokenIds.FromString(newer(TokenIds(ids=[1])))),
        ["token_ids.99"],
    ),
    "unknown field in chat": (
        generate_request(chat=Chat.FromString(newer(chat(("user", "a"))))),
        ["chat.99"],
    ),
    "unknown field in a turn": (
        generate_request(
            chat=Chat(messages=[ChatMessage.FromString(newer(ChatMessage(role="user")))])
        ),
        ["chat.messages[0].99"],
    ),
    "unknown field in sampling": (
        generate_request(sampling=SamplingParameters.FromString(UNKNOWN_FIELD)),
        ["sampling.99"],
    ),
    "unknown field in stop": (
        generate_request(stop=StopConditions.FromString(UNKNOWN_FIELD)),
        ["stop.99"],
    ),
    "tokenize nothing": (TokenizeRequest(), ["input"]),
    "tokenize an empty chat": (TokenizeRequest(chat=Chat()), ["chat.messages"]),
    "tokenize a long text": (TokenizeRequest(text="a" * (LIMIT + 1)), ["text"]),
    "a chat without special tokens": (
        TokenizeRequest(chat=chat(("user", "a")), omit_special_tokens=True),
        ["omit_special_tokens"],
    ),
    "tokenize with an unknown field": (
        TokenizeRequest.FromString(newer(TokenizeRequest(text="a"))),
        ["99"],
    ),
    "detokenize nothing": (DetokenizeRequest(), ["token_ids"]),
    "detokenize out of vocabulary": (DetokenizeRequest(token_ids=[300]), ["token_ids"]),
    "detokenize too many": (DetokenizeRequest(token_ids=[1] * 101), ["token_ids"]),
    "detokenize with an unknown field": (
        DetokenizeRequest.FromString(newer(DetokenizeRequest(token_ids=[1]))),
        ["99"],
    ),
    "list with an unknown field": (ListModelsRequest.FromString(UNKNOWN_FIELD), ["99"]),
}


@pytest.mark.parametrize(("request_message", "fields"), BROKEN.values(), ids=BROKEN.keys())
async def test_broken_rules_name_their_fields(
    edge: Edge, request_message: Message, fields: list[str]
) -> None:
    refused = await refusal_of(edge.stub, request_message)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.info.reason == "INVALID_FIELD"
    assert refused.fields == fields
    assert not edge.engine.requests


EDGES: dict[str, GenerateRequest] = {
    "temperature 0": sampling(temperature=0.0),
    "temperature 100": sampling(temperature=100.0),
    "top_p 1": sampling(top_p=1.0),
    "a tiny top_p": sampling(top_p=1e-30),
    "min_p 0": sampling(min_p=0.0),
    "min_p 1": sampling(min_p=1.0),
    "the largest top_k and seed": generate_request(
        sampling=SamplingParameters(top_k=2**31 - 1, seed=2**64 - 1)
    ),
    "max_tokens 1": stop(max_tokens=1),
    "max_tokens that just fit": stop(max_tokens=98),
    "16 stop strings": stop(strings=["é" * 256] * 16),
    "64 stop tokens": stop(token_ids=[299] * 64),
    "priorities": generate_request(priority=-100),
    "a salt": generate_request(cache_salt="é" * 64),
    "a request id": generate_request(request_id="~ !" + "a" * 125),
    "the longest prompt": generate_request(token_ids=TokenIds(ids=[299] * 99)),
    "by name": generate_request(model="tiny"),
    "an empty turn": generate_request(chat=chat(("user", ""))),
}


@pytest.mark.parametrize("request_message", EDGES.values(), ids=EDGES.keys())
async def test_the_ends_of_the_ranges_are_allowed(
    edge: Edge, request_message: GenerateRequest
) -> None:
    call = edge.stub.Generate(request_message)
    first = await call.read()
    assert isinstance(first, GenerateResponse)
    assert first.WhichOneof("event") == "started"
    call.cancel()


async def test_limits_are_quoted(edge: Edge) -> None:
    async def message(request: Message) -> str:
        return (await refusal_of(edge.stub, request)).message

    assert "100 tokens" in await message(generate_request(text="a" * 100))
    too_many = await message(stop(max_tokens=99))
    assert "100" in too_many
    assert "98" in too_many
    assert "300" in await message(generate_request(token_ids=TokenIds(ids=[300])))
    assert str(LIMIT) in await message(generate_request(text="a" * (LIMIT + 1)))


async def test_a_ten_megabyte_text_is_refused_by_name(edge: Edge) -> None:
    refused = await refusal_of(edge.stub, generate_request(text="a" * 10_000_000))
    assert refused.fields == ["text"]


async def test_many_broken_rules_make_no_large_answer(edge: Edge) -> None:
    refused = await refusal_of(edge.stub, stop(strings=[""] * 16, max_tokens=0))
    assert 1 < len(refused.fields) <= 8


@pytest.mark.parametrize(
    "request_message",
    [
        generate_request(model="other"),
        TokenizeRequest(model="other", text="a"),
        DetokenizeRequest(model="other", token_ids=[1]),
    ],
)
async def test_unknown_models_are_told_from_those_served(
    edge: Edge, request_message: Message
) -> None:
    refused = await refusal_of(edge.stub, request_message)
    assert refused.code is grpc.StatusCode.NOT_FOUND
    assert refused.info.reason == "MODEL_NOT_FOUND"
    assert refused.info.metadata == {"model": "other", "served_models": "tiny"}


async def test_a_long_unknown_name_is_cut(edge: Edge) -> None:
    refused = await refusal_of(edge.stub, generate_request(model="m" * 100_000))
    assert refused.info.metadata["model"] == "m" * 128


async def test_a_bad_request_leaves_no_trace_in_the_next(edge: Edge) -> None:
    answers = []
    for _ in range(2):
        response = await edge.stub.Tokenize(TokenizeRequest(text="control é"))
        answers.append(response.SerializeToString(deterministic=True))
        await refusal_of(edge.stub, sampling(temperature=math.nan))
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"top_k": 2**32 - 1}, "4294967295 is not in [0, 2147483647]"),
        ({"temperature": 100.00001}, "100.000008 is not in [0, 100]"),
        ({"min_p": float("nan")}, "nan is not in [0, 1]"),
    ],
)
def test_a_number_out_of_range_is_told_with_its_digits(values: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_generate(sampling(**values), MODEL)
    assert [violation.description for violation in raised.value.violations] == [said]
