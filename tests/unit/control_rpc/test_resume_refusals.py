"""What a resumed request may say and is refused for, and ends that its tokens reach already."""

from __future__ import annotations

import re

import grpc
import pytest
from google.protobuf import json_format

from control_plane.core import spans as core_spans
from control_plane.core.events import FinishReason
from control_plane.core.request import Origin, Resumed
from control_plane.core.tokens import Tokens
from control_plane.rpc.resumption import prompt_digest
from control_plane.shell.engine import CannotResume
from tests.support.edge_rig import Edge, generate_request, ids, refusal_of
from tests.support.planes import ROOT
from twinplane.common.v1.types_pb2 import SamplingParameters
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1.inference_pb2 import (
    GenerationOrigin,
    Resumption,
    StopConditions,
    WeightsSpan,
)

A, B, C = 64, 65, 66
"""Tokens of the rig's model that are a letter each."""
SEED = SamplingParameters(seed=7)
ORIGIN = GenerationOrigin(weights_digest="ab" * 32, arithmetic="x")


def resumed(*token_ids: int, **fields: object) -> pb.GenerateRequest:
    """A valid request but for the given fields; those of Resumption by name."""
    names = Resumption.DESCRIPTOR.fields_by_name
    own = {name: fields.pop(name) for name in list(fields) if name in names}
    fields.setdefault("sampling", SEED)
    return generate_request(resume=Resumption(token_ids=token_ids, **own), **fields)


UNKNOWN = Resumption.FromString(b"\xc8\x3e\x01")
LONG, LONG_BYTES = "x" * 2000, b"x" * 2000


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (resumed(300), "resume.token_ids"),
        (resumed(2**32 - 1), "resume.token_ids"),
        (resumed(*[A] * 101), "resume.token_ids"),
        (resumed(*[A] * 99), "resume.token_ids"),
        (resumed(*[A] * 4, stop=StopConditions(max_tokens=3)), "resume.token_ids"),
        (resumed(A, B, C, stop=StopConditions(token_ids=[B])), "resume.token_ids"),
        (resumed(256, A), "resume.token_ids"),
        (resumed(A, text_byte_count=2), "resume.text_byte_count"),
        (resumed(A, text_byte_count=2**63), "resume.text_byte_count"),
        (resumed(text_byte_count=1), "resume.text_byte_count"),
        (resumed(A, sampling=SamplingParameters()), "sampling.seed"),
        (resumed(A, sampling=SamplingParameters(temperature=0)), "sampling.seed"),
        (generate_request(resume=UNKNOWN, sampling=SEED), "resume.1001"),
        (resumed(origin=GenerationOrigin.FromString(b"\xc8\x3e\x01")), "resume.origin.1001"),
        (resumed(origin=GenerationOrigin(weights_digest=LONG)), "resume.origin.weights_digest"),
        (resumed(origin=GenerationOrigin(arithmetic=LONG)), "resume.origin.arithmetic"),
        (resumed(origin=GenerationOrigin(prompt_digest=LONG_BYTES)), "resume.origin.prompt_digest"),
        (resumed(origin=GenerationOrigin(weights_name=LONG)), "resume.origin.weights_name"),
        (resumed(origin=GenerationOrigin(adapter_digest=LONG)), "resume.origin.adapter_digest"),
        (resumed(A, weights_spans=[WeightsSpan(token_count=2)]), "resume.weights_spans"),
        (resumed(A, B, weights_spans=[WeightsSpan(token_count=1)]), "resume.weights_spans"),
        (resumed(A, weights_spans=[WeightsSpan(token_count=1)] * 2), "resume.weights_spans"),
        (resumed(weights_spans=[WeightsSpan(token_count=1)]), "resume.weights_spans"),
        (resumed(A, weights_spans=[WeightsSpan()]), "resume.weights_spans[0].token_count"),
        (
            resumed(A, weights_spans=[WeightsSpan(token_count=1, weights_digest=LONG)]),
            "resume.weights_spans[0]",
        ),
        (
            resumed(A, weights_spans=[WeightsSpan(token_count=1, weights_name=LONG)]),
            "resume.weights_spans[0]",
        ),
        (
            resumed(A, weights_spans=[WeightsSpan.FromString(b"\xc8\x3e\x01\x08\x01")]),
            "resume.weights_spans[0].1001",
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", [pb.GenerateRequest, pb.CompleteRequest])
async def test_each_rule_names_its_field(
    edge: Edge,
    request_: pb.GenerateRequest,
    field: str,
    method: type[pb.GenerateRequest] | type[pb.CompleteRequest],
) -> None:
    request = method.FromString(request_.SerializeToString())
    refusal = await refusal_of(edge.stub, request)
    assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
    assert refusal.info.reason == "INVALID_FIELD" and refusal.fields == [field], refusal.message
    assert not edge.engine.requests
    await edge.wait_counted()
    assert (edge.door.held_bytes, edge.engine.reserved) == (0, 0)


async def test_the_engine_gets_what_was_generated_and_where(edge: Edge) -> None:
    call = edge.stub.Generate(resumed(A, B, origin=ORIGIN))
    await edge.engine.stream()
    [request] = edge.engine.requests
    assert request.resumed is not None and request.seed == 7
    assert list(request.resumed.token_ids) == [A, B]
    assert request.resumed.origin == Origin("ab" * 32, "x")
    call.cancel()


async def test_what_made_the_tokens_is_told_to_the_engine_and_at_an_end(edge: Edge) -> None:
    spans = [
        WeightsSpan(token_count=1, weights_digest="a", weights_name="one"),
        WeightsSpan(token_count=1, weights_digest="b", kv_of_other_weights=True),
    ]
    call = edge.stub.Generate(resumed(A, B, weights_spans=[*spans[:1], *spans[1:]]))
    await edge.engine.stream()
    [request] = edge.engine.requests
    assert request.resumed is not None
    assert request.resumed.spans == (
        core_spans.WeightsSpan(1, "a", "one"),
        core_spans.WeightsSpan(1, "b", kv_of_other_weights=True),
    )
    call.cancel()
    ended = resumed(A, B, weights_spans=spans, stop=StopConditions(max_tokens=2))
    messages = [message async for message in edge.stub.Generate(ended)]
    assert list(messages[-1].finished.weights_spans) == spans
    origin = GenerationOrigin(weights_digest="a", weights_name="n", kv_of_other_weights=True)
    ended = resumed(A, B, origin=origin, stop=StopConditions(max_tokens=2))
    messages = [message async for message in edge.stub.Generate(ended)]
    [span] = messages[-1].finished.weights_spans
    assert span == WeightsSpan(
        token_count=2, weights_digest="a", weights_name="n", kv_of_other_weights=True
    )


async def test_without_tokens_it_is_the_request_anew(edge: Edge) -> None:
    """Its stream broke before the first token: even the seed may be unknown."""
    call = edge.stub.Generate(generate_request(resume=Resumption(), request_id="r"))
    await edge.engine.stream()
    [request] = edge.engine.requests
    assert request.resumed == Resumed(request.resumed.token_ids, None)  # type: ignore[union-attr]
    edge.engine.push([A], edge.engine.end(FinishReason.LENGTH, 1))
    messages = [message async for message in call]
    assert messages[1].delta.text == "a"


@pytest.mark.parametrize("differs", [("weights",), ("arithmetic",), ("weights", "arithmetic")])
async def test_what_the_engine_can_not_go_on_with(edge: Edge, differs: tuple[str, ...]) -> None:
    edge.engine.refusal = CannotResume(*differs)
    refusal = await refusal_of(edge.stub, resumed(A))
    assert (refusal.code, refusal.info.reason) == (
        grpc.StatusCode.FAILED_PRECONDITION, "CANNOT_RESUME",
    )  # fmt: skip
    assert refusal.info.metadata["differs"] == ",".join(differs)
    assert refusal.retry_seconds is None


async def test_another_prompt_is_not_gone_on_with(edge: Edge) -> None:
    prompt = ids("hi", edge)
    same = GenerationOrigin(prompt_digest=prompt_digest(prompt))
    call = edge.stub.Generate(resumed(A, origin=same))
    await edge.engine.stream()
    call.cancel()
    other = GenerationOrigin(prompt_digest=prompt_digest([*prompt, 1]))
    refusal = await refusal_of(edge.stub, resumed(A, origin=other))
    assert refusal.info.reason == "CANNOT_RESUME"
    assert refusal.info.metadata["differs"] == "prompt"


@pytest.mark.parametrize(
    ("request_", "reason", "matched", "text", "count"),
    [
        (resumed(A, B, stop=StopConditions(max_tokens=2)), "LENGTH", None, "", 2),
        (resumed(A, B, stop=StopConditions(token_ids=[B])), "STOP", B, "", 2),
        (resumed(A, 256), "STOP", None, "", 2),
        (resumed(A, B, stop=StopConditions(strings=["b"])), "STOP", "b", "", 2),
        (resumed(A, B, text_byte_count=0, stop=StopConditions(strings=["b"])), "STOP", "b", "a", 2),
        (resumed(A, B, text_byte_count=1, stop=StopConditions(strings=["b"])), "STOP", "b", "", 2),
        # Several at once: as core.ends says.
        (resumed(A, B, stop=StopConditions(strings=["ab"], token_ids=[B], max_tokens=2)), "STOP",
         "ab", "", 2),
        # What was held back for a stop text that never came, and half a character.
        (resumed(A, B, text_byte_count=1, stop=StopConditions(strings=["bc"], max_tokens=2)),
         "LENGTH", None, "b", 2),
        (resumed(A, 128, text_byte_count=1, stop=StopConditions(max_tokens=2)), "LENGTH", None,
         "\ufffd", 2),
    ],
)  # fmt: skip
async def test_an_end_that_the_tokens_reach_is_the_answer(
    edge: Edge,
    request_: pb.GenerateRequest,
    reason: str,
    matched: str | int | None,
    text: str,
    count: int,
) -> None:
    """No engine is asked: the end was lost on its way to the client."""
    messages = [message async for message in edge.stub.Generate(request_)]
    assert not edge.engine.requests
    assert "".join(message.delta.text for message in messages) == text
    assert not any(message.delta.token_ids for message in messages)
    finished = messages[-1].finished
    assert pb.FinishReason.Name(finished.reason) == f"FINISH_REASON_{reason}"
    which = finished.WhichOneof("matched")
    assert (getattr(finished, which) if which else None) == matched
    assert finished.usage.completion_token_count == count
    assert finished.usage.prompt_token_count == messages[0].started.prompt_token_count
    await edge.wait_counted()
    assert (edge.door.held_bytes, edge.engine.reserved) == (0, 0)


async def test_what_changed_before_is_told_at_an_end_too(edge: Edge) -> None:
    origin = GenerationOrigin(weights_digest="a", arithmetic="x", arithmetic_changed=True)
    request = resumed(A, B, origin=origin, stop=StopConditions(max_tokens=2))
    messages = [message async for message in edge.stub.Generate(request)]
    assert messages[-1].finished.arithmetic_changed


async def test_where_tokens_come_from_is_told_once_and_when_it_changes(edge: Edge) -> None:
    call = edge.stub.Generate(generate_request())
    stream = await edge.engine.stream()
    first, second = Origin("w", "one"), Origin("w", "two")
    origins = []
    await call.read()
    for origin in (first, first, second, second, first):
        stream.made_with(origin)
        stream.push(Tokens([A]), None)
        message = await call.read()
        assert isinstance(message, pb.GenerateResponse)
        told = message.delta
        origins.append(
            (told.origin.arithmetic, told.origin.arithmetic_changed)
            if told.HasField("origin")
            else None
        )
        assert not told.HasField("origin") or len(told.origin.prompt_digest) == 16
    assert origins == [("one", False), None, ("two", True), None, ("one", True)]
    call.cancel()


async def test_the_example_of_the_contracts_page(edge: Edge) -> None:
    page = (ROOT / "docs" / "contract.md").read_text().partition("## Resuming")[2]
    [example] = re.findall(r"^```json\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    request = json_format.Parse(example, pb.GenerateRequest())
    call = edge.stub.Generate(request)
    await edge.engine.stream()
    [asked] = edge.engine.requests
    assert asked.resumed is not None and list(asked.resumed.token_ids) == [65, 66, 67]
    assert (asked.seed, asked.stop.max_tokens, asked.request_id) == (42, 16, "gen-1")
    edge.engine.push([A], edge.engine.end(FinishReason.LENGTH, 4))
    assert "".join([message.delta.text async for message in call]) == "a"
