"""Who comes in: refused before a message is received, and every place and byte given back."""

from __future__ import annotations

import asyncio
import gzip

import grpc
import pytest

from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits
from tests.simulation.rig import until
from tests.support.edge_rig import HI, Edge, generate_request, refusal_of, refused, running_edge
from tests.support.gate import Gate
from twinplane.inference.v1 import inference_pb2 as pb

GENERATE = "/twinplane.inference.v1.InferenceService/Generate"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
PATIENCE = 60.0


async def reserved(edge: Edge, count: int) -> None:
    """Until that many requests are on their way to the engine."""
    async with asyncio.timeout(PATIENCE):
        await until(lambda: edge.engine.reserved >= count)


async def test_a_full_queue_answers_before_any_of_the_message_is_there(edge: Edge) -> None:
    edge.engine.places = 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as channel:
        call = channel.stream_stream(GENERATE)()  # headers, and nothing more
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asyncio.wait_for(call.read(), PATIENCE)
    answer = refused(error.value)
    assert (answer.code, answer.info.reason, answer.retry_seconds) == (EXHAUSTED, "QUEUE_FULL", 2.5)
    await edge.wait_counted()
    assert edge.calls == [("Generate", "RESOURCE_EXHAUSTED")]


async def test_a_full_queue_looks_at_no_request(edge: Edge) -> None:
    """One that is wrong in other ways too is told the one thing that costs nothing to know."""
    edge.engine.places = 0
    for request in (
        generate_request(text="x" * 262_144),
        generate_request(model="no-such-model", text=""),
        generate_request(chat=HI),
    ):
        answer = await refusal_of(edge.stub, request)
        assert (answer.code, answer.info.reason) == (EXHAUSTED, "QUEUE_FULL")


async def test_a_full_queue_refuses_nothing_but_generations(edge: Edge) -> None:
    edge.engine.places = 0
    assert (await edge.stub.Tokenize(pb.TokenizeRequest(text="hi"))).token_ids
    assert (await edge.stub.ListModels(pb.ListModelsRequest())).models


async def test_nobody_is_refused_while_there_are_places_and_one_more_is(
    tiny_text: TextModel,
) -> None:
    """All come at once, and none is in the engine yet: their texts are still being worked on."""
    gate = Gate()
    async with running_edge(tiny_text, TextLimits(thread_count=1), gate) as edge:
        edge.engine.places = 128
        calls = [edge.stub.Generate(generate_request(chat=HI)) for _ in range(128)]
        await reserved(edge, 128)
        answer = await refusal_of(edge.stub, generate_request())
        assert (answer.code, answer.info.reason) == (EXHAUSTED, "QUEUE_FULL")
        assert not edge.engine.requests
        gate.open()
        for call in calls:
            assert (await call.read()).started.request_id
        assert len(edge.engine.requests) == 128
        assert (edge.engine.reserved, edge.door.held_bytes) == (0, 0)
        for call in calls:
            call.cancel()


async def test_a_place_is_given_back_however_a_call_ends(tiny_text: TextModel) -> None:
    gate = Gate()
    async with running_edge(tiny_text, TextLimits(thread_count=1), gate) as edge:
        edge.engine.places = 1
        for wrong in (generate_request(text=""), generate_request(model="none")):
            assert (await refusal_of(edge.stub, wrong)).code is not EXHAUSTED
        async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="not a twinplane"):
                await channel.unary_stream(GENERATE)(b"\x0b").read()
        for timeout in (None, 0.5):
            call = edge.stub.Generate(generate_request(chat=HI), timeout=timeout)
            await reserved(edge, 1)
            assert edge.door.held_bytes > 0
            if timeout is None:
                call.cancel()
            count = len(edge.calls)
            await edge.wait_counted(count + 1)
            assert (edge.engine.reserved, edge.door.held_bytes) == (0, 0)
        assert edge.calls[-1] == ("Generate", "DEADLINE_EXCEEDED")
        edge.engine.refusal = KeyError("a bug")
        assert (await refusal_of(edge.stub, generate_request())).code is grpc.StatusCode.INTERNAL
        assert (edge.engine.reserved, edge.door.held_bytes) == (0, 0)
        assert not edge.engine.requests, "none of them was executed"


async def test_what_waits_to_be_tokenized_has_a_bound_in_bytes(tiny_text: TextModel) -> None:
    gate = Gate()
    turn = pb.ChatMessage(role="user", content="x" * 60)
    large = generate_request(chat=pb.Chat(messages=[turn]))
    limits = TextLimits(thread_count=1)
    async with running_edge(tiny_text, limits, gate, max_held_bytes=170) as edge:
        calls = [edge.stub.Generate(large) for _ in range(2)]
        await reserved(edge, 2)
        for request in (large, pb.TokenizeRequest(chat=large.chat)):
            answer = await refusal_of(edge.stub, request)
            assert (answer.code, answer.info.reason) == (EXHAUSTED, "TEXT_QUEUE_FULL")
            assert answer.retry_seconds == 1.0
        assert (await edge.stub.Tokenize(pb.TokenizeRequest(text="hi"))).token_ids, "it is small"
        gate.open()
        for call in calls:
            await call.read()
        await edge.stub.Tokenize(pb.TokenizeRequest(text="x" * 100))
        assert edge.door.held_bytes == 0, "what was submitted is held as tokens only"
        for call in calls:
            call.cancel()


async def test_one_request_alone_passes_whatever_the_bound_is(tiny_text: TextModel) -> None:
    async with running_edge(tiny_text, TextLimits(), max_held_bytes=1) as edge:
        assert (await edge.stub.Tokenize(pb.TokenizeRequest(text="hello"))).token_ids


async def test_a_compressed_request_is_what_it_is_uncompressed(edge: Edge) -> None:
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        request = pb.TokenizeRequest(text="again and " * 100)
        answer = await edge.stub.Tokenize(request, compression=compression)
        assert answer == await edge.stub.Tokenize(request)


async def test_a_packed_request_counts_for_what_it_holds_unpacked(edge: Edge) -> None:
    """The library unpacks for this rig: this is sent as our servers get it from theirs."""
    packed = gzip.compress(generate_request(text="x" * (5 << 20)).SerializeToString())
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await channel.unary_stream(GENERATE)(packed).read()
    answer = refused(error.value)
    assert (answer.code, answer.info.reason) == (EXHAUSTED, "MESSAGE_TOO_LARGE")
    await edge.wait_counted()
    assert edge.calls == [("Generate", "RESOURCE_EXHAUSTED")]
    assert not edge.engine.requests
