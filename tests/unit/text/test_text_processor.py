"""Text work off the loop: bounded, and never blocking it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
from tokenizers import AddedToken

from control_plane.text.chat_template import ChatMessage, Rendering
from control_plane.text.end_of_sequence import EndTokens
from control_plane.text.errors import NoChatTemplate, TemplateFailed, TextBusy, TextTooLong
from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits, TextProcessor
from control_plane.text.tokenizer import Tokenizer
from control_plane.text.turn_end import SAMPLE_CHAT
from tests.support.gate import Gate
from tests.support.toy_tokenizers import bytetoy

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


CHATML = "<|im_start|>user\nWinter<|im_end|>\n<|im_start|>assistant\nSpring<|im_end|>\n"


class Renderer:
    """Renders the sample chat as ChatML does, and all others to a letter; both may be refused."""

    def __init__(self, sample: str | None = CHATML) -> None:
        self.sample = sample
        self.samples = 0

    def usable(self) -> bool:
        return True

    def render(self, messages: Sequence[ChatMessage]) -> Rendering:
        if tuple(messages) != SAMPLE_CHAT:
            return Rendering("a")
        self.samples += 1
        if self.sample is None:
            raise TemplateFailed("no")
        return Rendering(self.sample)

    def close(self) -> None:
        """Nothing runs."""


def speaking(ends: EndTokens, renderer: Renderer, *, special: bool = True) -> TextProcessor:
    """A to z and specials: 256 <|im_start|>, 257 <|im_end|>."""
    added = [AddedToken(f"<|im_{name}|>", special=special) for name in ("start", "end")]
    return TextProcessor(TextModel(Tokenizer(bytetoy(added)), None, ends), LIMITS, renderer)


async def test_what_ends_a_chat_is_asked_once() -> None:
    renderer = Renderer()
    text = speaking(EndTokens(frozenset({5})), renderer)
    for _ in range(3):
        await text.encode_chat([ChatMessage("user", "a")])
    assert renderer.samples == 1
    assert text.ends(chat=True, ignored=False).ids == {5, 257}
    assert text.ends(chat=False, ignored=False).ids == {5}
    assert text.ends(chat=True, ignored=True).ids == frozenset()
    text.close()


async def test_a_template_that_refuses_the_sample_ends_nothing_by_itself() -> None:
    renderer = Renderer(None)
    text = speaking(EndTokens(frozenset({5})), renderer)
    for count in (1, 2):
        assert await text.encode_chat([ChatMessage("user", "a")])
        assert renderer.samples == count
        assert text.ends(chat=True, ignored=False).ids == {5}
    # Perhaps its process was killed: the next chat asks again.
    renderer.sample = CHATML
    await text.encode_chat([ChatMessage("user", "a")])
    assert text.ends(chat=True, ignored=False).ids == {5, 257}
    text.close()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("ends", [EndTokens(frozenset({257})), EndTokens(*[frozenset({257})] * 2)])
@pytest.mark.parametrize("ignored", [True, False])
async def test_an_end_has_no_text_whatever_it_is_called(
    special: bool, ends: EndTokens, ignored: bool
) -> None:
    text = speaking(ends, Renderer(), special=special)
    a, b = await text.encode("ab", add_special_tokens=False)
    assembler = text.assembler([], [a], text.ends(chat=False, ignored=ignored))
    assembler.push([a, 257, b])
    assembler.finish()
    assert assembler.drain() == "ab"
    assert await text.decode([a, 257, b], skip_special_tokens=True) == "ab"
    assert await text.decode([a, 257, b], skip_special_tokens=False) == "a<|im_end|>b"
    text.close()


async def test_an_end_that_is_an_ordinary_piece_is_text_where_nothing_ends() -> None:
    processor = speaking(EndTokens(), Renderer())
    [a, line] = await processor.encode("a\n", add_special_tokens=False)
    processor.close()
    text = speaking(EndTokens(frozenset({line})), Renderer())
    for ignored, expected in ((True, "a\n"), (False, "a")):
        assembler = text.assembler([], [a], text.ends(chat=False, ignored=ignored))
        assembler.push([a, line])
        assert assembler.drain() == expected
    assert await text.decode([a, line, a], skip_special_tokens=True) == "a\na"
    text.close()
