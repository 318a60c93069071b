"""Stop texts that no tokens give are refused, and those that come about with the end are found."""

from __future__ import annotations

import asyncio

from control_plane.core.events import FinishReason
from control_plane.text.end_of_sequence import EndTokens
from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits
from control_plane.text.tokenizer import Tokenizer
from tests.support.edge_rig import Edge, generate_request, refusal_of, running_edge
from tests.support.toy_tokenizers import bert
from twinplane.inference.v1 import inference_pb2 as pb


def stopped_by(*strings: str) -> pb.GenerateRequest:
    return generate_request(text="hello", stop=pb.StopConditions(strings=strings))


async def test_a_stop_text_that_no_tokens_give_is_refused() -> None:
    model = TextModel(Tokenizer(bert()), None, EndTokens())
    async with running_edge(model, TextLimits()) as edge:
        refused = await refusal_of(edge.stub, stopped_by("world", "World", ".", "\n"))
        assert (refused.code.name, refused.info.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert refused.fields == ["stop.strings[1]", "stop.strings[3]"]
        assert not edge.engine.requests
        call = edge.stub.Generate(stopped_by("world", "."))
        await edge.engine.stream()
        call.cancel()


async def test_a_stop_text_may_come_about_with_the_end(edge: Edge) -> None:
    """A character that is still incomplete when the tokens are used up becomes U+FFFD."""
    for strings, reason, text in (
        (["\ufffd"], pb.FINISH_REASON_STOP, "a"),
        (["x"], pb.FINISH_REASON_LENGTH, "a\ufffd"),
    ):
        edge.engine.submitted.clear()
        call = edge.stub.Generate(stopped_by(*strings))
        await edge.engine.stream()
        tokens = edge.text_model.tokenizer.encode("a€", add_special_tokens=False)[:-1]
        count = edge.engine.push(tokens)
        assert count == len(tokens)
        edge.engine.push([], edge.engine.end(FinishReason.LENGTH, count))
        async with asyncio.timeout(60):
            responses = [response async for response in call]
        finished = responses[-1].finished
        assert "".join(response.delta.text for response in responses) == text
        assert finished.reason == reason
        assert finished.stop_string == (strings[0] if reason == pb.FINISH_REASON_STOP else "")
        assert finished.usage.completion_token_count == count
