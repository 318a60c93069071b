"""The inference service over a loopback server: streams, cancellation, errors."""

from __future__ import annotations

import asyncio
from array import array

import grpc
import pytest

from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.core.request import SamplingParams, StopConditions
from control_plane.text.chat_template import ChatTemplate
from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits
from tests.support.edge_rig import (
    HI,
    Edge,
    generate_request,
    ids,
    refusal_of,
    running_edge,
)
from tests.support.gate import Gate
from tests.support.wire import Wire
from twinplane.common.v1.types_pb2 import SamplingParameters, TokenIds
from twinplane.common.v1.types_pb2 import Usage as UsageMessage
from twinplane.inference.v1 import inference_pb2
from twinplane.inference.v1.inference_pb2 import (
    Chat,
    ChatMessage,
    CompleteRequest,
    DetokenizeRequest,
    GenerateRequest,
    GenerateResponse,
    GenerationDelta,
    GenerationFinished,
    ListModelsRequest,
    TokenizeRequest,
)
from twinplane.inference.v1.inference_pb2 import (
    StopConditions as StopMessage,
)
from twinplane.inference.v1.inference_pb2_grpc import InferenceServiceStub

END = 256  # <|endoftext|>


async def collect(edge: Edge, request: GenerateRequest) -> list[GenerateResponse]:
    return [response async for response in edge.stub.Generate(request)]


def joined(responses: list[GenerateResponse]) -> tuple[str, list[int], GenerationFinished]:
    """All text, all tokens, the end; checks the order of events."""
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    deltas = [response.delta for response in responses[1:-1]]
    assert all(delta != GenerationDelta() for delta in deltas)
    tokens = [token for delta in deltas for token in delta.token_ids]
    return "".join(delta.text for delta in deltas), tokens, responses[-1].finished


async def test_a_generation_from_start_to_end(edge: Edge) -> None:
    answer = asyncio.create_task(collect(edge, generate_request(text="hé")))
    await edge.engine.stream()
    tokens = ids("Größe €", edge)
    for token in tokens[:-1]:
        edge.engine.push([token])
        await asyncio.sleep(0)
    edge.engine.push(tokens[-1:], Finish(FinishReason.LENGTH, Usage(3, 2, len(tokens))))
    responses = await answer
    started = responses[0].started
    assert (started.request_id, started.model) == ("made-1", "tiny")
    assert (started.prompt_token_count, started.seed) == (3, 7)
    text, sent, finished = joined(responses)
    assert (text, sent) == ("Größe €", tokens)
    assert finished == GenerationFinished(
        reason=inference_pb2.FINISH_REASON_LENGTH,
        usage=UsageMessage(
            prompt_token_count=3, cached_prompt_token_count=2, completion_token_count=len(tokens)
        ),
    )
    await edge.wait_counted()
    assert edge.calls == [("Generate", "OK")]
    assert not edge.engine.finished


async def test_what_is_asked_is_what_is_submitted(edge: Edge) -> None:
    for request in (
        generate_request(
            text="hi",
            sampling=SamplingParameters(temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=0),
            stop=StopMessage(max_tokens=5, token_ids=[9, 10]),
            priority=-3,
            cache_salt="tenant",
            request_id="mine",
        ),
        generate_request(token_ids=TokenIds(ids=[5, 299])),
        generate_request(text="hi", stop=StopMessage(ignore_end_of_sequence=True)),
    ):
        call = edge.stub.Generate(request)
        await call.read()
        call.cancel()
    mine, bare, endless = edge.engine.requests
    assert mine.request_id == "mine"
    assert mine.prompt_token_ids == array("I", ids("hi", edge))
    assert mine.sampling == SamplingParams(0.5, 3, 0.25, 0.125)
    assert mine.seed == 0
    assert mine.stop == StopConditions(5, frozenset({9, 10}), frozenset({END}))
    assert (mine.arrival, mine.priority, mine.cache_salt) == (12.5, -3, "tenant")
    assert bare.request_id == "made-1"
    assert bare.prompt_token_ids == array("I", [5, 299])
    assert bare.sampling == SamplingParams(1.0, 0, 1.0, 0.0)
    assert bare.seed == 7
    assert bare.stop == StopConditions(98, frozenset(), frozenset({END}))
    assert (bare.priority, bare.cache_salt) == (0, "")
    assert endless.stop.end_of_sequence_ids == frozenset()


async def test_a_chat_is_rendered_by_the_template(edge: Edge) -> None:
    call = edge.stub.Generate(
        generate_request(chat=Chat(messages=[ChatMessage(role="user", content="hi")]))
    )
    await call.read()
    call.cancel()
    [request] = edge.engine.requests
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert request.prompt_token_ids == array("I", ids(expected, edge))
    assert len(request.prompt_token_ids) < len(expected), "special tokens became themselves"


async def test_stop_token(edge: Edge) -> None:
    answer = asyncio.create_task(collect(edge, generate_request()))
    await edge.engine.stream()
    tokens = ids("ab", edge)
    finish = edge.engine.end(FinishReason.STOP, 2, stop_token_id=tokens[-1])
    edge.engine.push(tokens, finish)
    text, sent, finished = joined(await answer)
    assert (text, sent) == ("ab", tokens)
    assert finished.WhichOneof("matched") == "stop_token_id"
    assert finished.stop_token_id == tokens[-1]


async def test_end_of_sequence_is_counted_and_not_shown(edge: Edge) -> None:
    answer = asyncio.create_task(collect(edge, generate_request()))
    await edge.engine.stream()
    tokens = [*ids("ab", edge), END]
    edge.engine.push(tokens, edge.engine.end(FinishReason.STOP, 3))
    text, sent, finished = joined(await answer)
    assert (text, sent) == ("ab", tokens)
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert finished.WhichOneof("matched") is None
    assert finished.usage.completion_token_count == 3


async def test_stop_string_over_tokens(edge: Edge) -> None:
    request = generate_request(stop=StopMessage(strings=["never", "ST€P"]))
    answer = asyncio.create_task(collect(edge, request))
    await edge.engine.stream()
    tokens = ids("go ST€P more", edge)
    count = len(ids("go ST€P", edge))
    assert edge.engine.push(tokens[:5]) == 5
    assert edge.engine.push(tokens[5:]) == count - 5, "the core learns of the match"
    text, sent, finished = joined(await answer)
    assert (text, sent) == ("go ", tokens[:count])
    assert finished.stop_string == "ST€P"
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert finished.usage.completion_token_count == count


async def test_stop_string_complete_with_the_last_token(edge: Edge) -> None:
    request = generate_request(stop=StopMessage(strings=["b"]))
    answer = asyncio.create_task(collect(edge, request))
    await edge.engine.stream()
    tokens = ids("ab", edge)
    edge.engine.push(tokens, edge.engine.end(FinishReason.LENGTH, 2))
    text, _, finished = joined(await answer)
    assert text == "a"
    assert finished.reason == inference_pb2.FINISH_REASON_STOP
    assert finished.stop_string == "b"


async def test_held_back_text_comes_at_the_end(edge: Edge) -> None:
    request = generate_request(stop=StopMessage(strings=["abc"]))
    answer = asyncio.create_task(collect(edge, request))
    await edge.engine.stream()
    tokens = ids("xab", edge)
    edge.engine.push(tokens)
    await asyncio.sleep(0)
    edge.engine.push([], edge.engine.end(FinishReason.LENGTH, 3))
    text, sent, finished = joined(await answer)
    assert (text, sent) == ("xab", tokens)
    assert finished.reason == inference_pb2.FINISH_REASON_LENGTH


async def test_half_a_character_at_the_end_is_replaced(edge: Edge) -> None:
    answer = asyncio.create_task(collect(edge, generate_request()))
    await edge.engine.stream()
    edge.engine.push(ids("a€", edge)[:3], edge.engine.end(FinishReason.LENGTH, 3))
    text, _, _ = joined(await answer)
    assert text == "a\ufffd"


async def test_a_slow_reader_gets_everything_in_fewer_messages(edge: Edge) -> None:
    call = edge.stub.Generate(generate_request())
    await edge.engine.stream()
    tokens = [index % 256 for index in range(60_000)]
    for token in tokens:
        edge.engine.push([token])
        # Let the server send until the client's flow control window is full.
        await asyncio.sleep(0)
    edge.engine.push([], edge.engine.end(FinishReason.LENGTH, len(tokens)))
    responses = [response async for response in call]
    text, sent, _ = joined(responses)
    assert sent == tokens
    assert text == edge.text_model.tokenizer.decode(tokens, hidden=frozenset())
    assert len(responses) < len(tokens) / 2


async def test_leaving_frees_the_request(edge: Edge) -> None:
    call = edge.stub.Generate(generate_request(request_id="left"))
    await edge.engine.stream()
    edge.engine.push([1])
    await call.read()
    assert not edge.engine.finished
    call.cancel()
    await asyncio.wait_for(edge.engine.freed.wait(), 60)
    assert edge.engine.finished == [("left", FinishReason.CANCELLED)]
    await edge.wait_counted()
    assert edge.calls == [("Generate", "CANCELLED")]


async def test_a_deadline_frees_the_request(edge: Edge) -> None:
    call = edge.stub.Generate(generate_request(request_id="late"), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(edge.engine.freed.wait(), 60)
    assert edge.engine.finished == [("late", FinishReason.DEADLINE)]
    await edge.wait_counted()
    [(method, code)] = edge.calls
    assert method == "Generate"
    assert code in ("DEADLINE_EXCEEDED", "CANCELLED")


async def test_a_lost_connection_frees_the_request(edge: Edge) -> None:
    async with Wire(edge.port) as wire:
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{wire.port}")
        stub = InferenceServiceStub(channel)
        call = stub.Generate(generate_request(request_id="gone"))
        await edge.engine.stream()
        await call.read()
        wire.cut()
        for _ in range(100):
            edge.engine.push([1])
            await asyncio.sleep(0)
        await asyncio.wait_for(edge.engine.freed.wait(), 60)
        assert edge.engine.finished == [("gone", FinishReason.CANCELLED)]
        await edge.wait_counted()
        assert edge.calls == [("Generate", "CANCELLED")]
        await channel.close()


async def test_a_client_that_leaves_while_its_text_is_worked_on_submits_nothing(
    tiny_text: TextModel,
) -> None:
    gate = Gate()
    async with running_edge(tiny_text, TextLimits(thread_count=1), gate) as edge:
        call = edge.stub.Generate(generate_request(chat=HI))
        await gate.wait_entered()
        call.cancel()
        await edge.wait_counted()
        gate.open()
        # The thread takes work in order: what the client left has been done before this.
        assert await edge.stub.Tokenize(TokenizeRequest(chat=HI))
        assert not edge.engine.requests
        assert edge.calls[0] == ("Generate", "CANCELLED")


async def test_finished_and_left_at_once_frees_nothing_of_others(edge: Edge) -> None:
    call = edge.stub.Generate(generate_request(request_id="same"))
    await edge.engine.stream()
    edge.engine.push([1], edge.engine.end(FinishReason.LENGTH, 1))
    call.cancel()
    await edge.wait_counted()
    assert not edge.engine.finished


async def test_tokenize_and_detokenize(edge: Edge) -> None:
    text = "naïve 🙂<|im_end|>"
    tokenized = await edge.stub.Tokenize(TokenizeRequest(text=text))
    assert list(tokenized.token_ids) == ids(text, edge)
    assert tokenized.max_sequence_token_count == 100
    shown = await edge.stub.Detokenize(DetokenizeRequest(token_ids=tokenized.token_ids))
    assert shown.text == "naïve 🙂"
    kept = await edge.stub.Detokenize(
        DetokenizeRequest(token_ids=tokenized.token_ids, keep_special_tokens=True)
    )
    assert kept.text == text
    broken = await edge.stub.Detokenize(DetokenizeRequest(token_ids=ids("€", edge)[:2]))
    assert broken.text == "\ufffd"
    chat = Chat(messages=[ChatMessage(role="user", content="hi")])
    rendered = await edge.stub.Tokenize(TokenizeRequest(chat=chat))
    assert list(rendered.token_ids) == ids(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", edge
    )
    assert (await edge.stub.Tokenize(TokenizeRequest(text=""))).token_ids == []


async def test_list_models(edge: Edge) -> None:
    [model] = (await edge.stub.ListModels(ListModelsRequest())).models
    assert (model.name, model.max_sequence_token_count, model.vocabulary_size) == ("tiny", 100, 300)
    assert model.supports_chat
    assert (model.weight_version.generation, model.weight_version.digest) == (1, "ab" * 32)
    assert model.default_sampling == SamplingParameters(temperature=1, top_k=0, top_p=1, min_p=0)


async def test_a_model_s_own_sampling_is_reported_and_used(tiny_text: TextModel) -> None:
    own = SamplingParams(0.5, 20, 0.75, 0.125)
    async with running_edge(tiny_text, TextLimits(), default_sampling=own) as edge:
        [model] = (await edge.stub.ListModels(ListModelsRequest())).models
        assert model.default_sampling == SamplingParameters(
            temperature=0.5, top_k=20, top_p=0.75, min_p=0.125
        )
        for sampling in (None, SamplingParameters(temperature=0, top_k=0), model.default_sampling):
            call = edge.stub.Generate(generate_request(sampling=sampling))
            await call.read()
            call.cancel()
        edge.engine.submitted.clear()
        whole = asyncio.ensure_future(edge.stub.Complete(CompleteRequest(text="hi")))
        await edge.engine.stream()
        whole.cancel()
        unset, greedy, named, complete = edge.engine.requests
        assert complete.sampling == own
        assert unset.sampling == named.sampling == own
        assert greedy.sampling == SamplingParams(0.0, 0, 0.75, 0.125)


async def test_a_model_without_a_template(tiny_text: TextModel) -> None:
    model = TextModel(tiny_text.tokenizer, None, tiny_text.ends)
    async with running_edge(model, TextLimits()) as edge:
        [served] = (await edge.stub.ListModels(ListModelsRequest())).models
        assert not served.supports_chat
        chat = Chat(messages=[ChatMessage(role="user", content="hi")])
        answer = await refusal_of(edge.stub, generate_request(chat=chat))
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert answer.fields == ["chat"]


async def test_a_template_that_does_not_compile_costs_chat_alone(tiny_text: TextModel) -> None:
    template = ChatTemplate("{% if %}", {}, "chat_template.jinja")
    model = TextModel(tiny_text.tokenizer, template, tiny_text.ends)
    async with running_edge(model, TextLimits()) as edge:
        [served] = (await edge.stub.ListModels(ListModelsRequest())).models
        assert not served.supports_chat
        answer = await refusal_of(edge.stub, generate_request(chat=HI))
        assert answer.code is grpc.StatusCode.INVALID_ARGUMENT
        assert answer.info.reason == "NO_CHAT_TEMPLATE"
        assert "chat_template.jinja" in answer.message
        assert (await edge.stub.Tokenize(TokenizeRequest(text="a"))).token_ids
