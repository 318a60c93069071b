"""Text work off the loop: bounded, and never blocking it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from control_plane.text.chat_template import ChatMessage
from control_plane.text.end_of_sequence import EndTokens
from control_plane.text.errors import NoChatTemplate, TextBusy, TextTooLong
from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits, TextProcessor
from control_plane.text.tokenizer import Tokenizer
from tests.support.gate import Gate

LIMITS = TextLimits(max_characters=1000, max_pending=2, thread_count=1, inline_characters=10)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def processor(byte_level: Tokenizer, gate: Gate) -> AsyncIterator[TextProcessor]:
    processor = TextProcessor(TextModel(byte_level, None, EndTokens(frozenset({1}))), LIMITS, gate)
    yield processor
    gate.open()
    processor.close()


async def test_short_and_long_texts_give_the_same_tokens(processor: TextProcessor) -> None:
    for text in ("a", "a" * 10, "a" * 11, "the " * 50):
        tokens = await processor.encode(text, add_special_tokens=True)
        assert await processor.decode(tokens, skip_special_tokens=True) == text


async def test_special_tokens_in_texts_are_themselves(processor: TextProcessor) -> None:
    tokens = await processor.encode("a<|end|>", add_special_tokens=True)
    assert len(tokens) == 2
    assert await processor.decode(tokens, skip_special_tokens=True) == "a"
    assert await processor.decode(tokens, skip_special_tokens=False) == "a<|end|>"


async def test_the_limit_is_quoted(processor: TextProcessor) -> None:
    with pytest.raises(TextTooLong, match="1000"):
        await processor.encode("a" * 1001, add_special_tokens=True)
    with pytest.raises(TextTooLong, match="1000"):
        await processor.encode_chat([ChatMessage("user", "a" * 1001)])


async def test_too_much_waiting_work_is_refused(processor: TextProcessor, gate: Gate) -> None:
    turns = [ChatMessage("user", "ab")]
    first = asyncio.create_task(processor.encode_chat(turns))
    await gate.wait_entered()
    second = asyncio.create_task(processor.encode_chat(turns))
    await asyncio.sleep(0)
    with pytest.raises(TextBusy):
        await processor.encode_chat(turns)
    # Short texts go on meanwhile, on the loop.
    assert await processor.encode("ab", add_special_tokens=True)
    gate.open()
    assert await first == await second == list(b"ab")
    assert await processor.encode_chat(turns) == list(b"ab")


async def test_abandoned_work_keeps_its_place_while_it_runs(
    processor: TextProcessor, gate: Gate
) -> None:
    turns = [ChatMessage("user", "ab")]
    running = asyncio.create_task(processor.encode_chat(turns))
    await gate.wait_entered()
    waiting = asyncio.create_task(processor.encode_chat(turns))
    await asyncio.sleep(0)
    for task in (running, waiting):
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    # The waiting one is gone, the running one is not.
    third = asyncio.create_task(processor.encode_chat(turns))
    await asyncio.sleep(0)
    with pytest.raises(TextBusy):
        await processor.encode_chat(turns)
    gate.open()
    assert await third == list(b"ab")


async def test_a_model_without_template_has_no_chat(byte_level: Tokenizer) -> None:
    processor = TextProcessor(TextModel(byte_level, None, EndTokens()), LIMITS, None)
    assert not await processor.supports_chat()
    with pytest.raises(NoChatTemplate):
        await processor.encode_chat([ChatMessage("user", "a")])
    processor.close()
    processor.close()
