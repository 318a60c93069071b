"""The way from a replica to a client: nothing lost, nothing after the end, text in its place."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.core.request import Origin
from control_plane.core.tokens import Tokens
from control_plane.rpc.answers import deltas
from control_plane.shell.engine import EngineLost
from control_plane.shell.stream import Delta, TokenStream

NOTHING = Tokens([])
END = Finish(FinishReason.LENGTH, Usage(3, 1, 4))


class Letters:
    """A text sink: token n is the nth letter. Searches for a letter if it was given one.

    The last letter is held back until there is another or the end.
    """

    def __init__(self, stop: str | None = None) -> None:
        self._stop = stop
        self._text = ""
        self.stop_string: str | None = None
        self.pushed: list[list[int]] = []

    @property
    def searches(self) -> bool:
        return self._stop is not None

    def push(self, token_ids: list[int]) -> int | None:
        self.pushed.append(token_ids)
        for count, token in enumerate(token_ids, start=1):
            letter = chr(ord("a") + token)
            if letter == self._stop:
                self.stop_string = letter
                return count
            self._text += letter
        return None

    def finish(self) -> None:
        self._text += "."

    def drain(self) -> str:
        kept = "" if self._text.endswith(".") else self._text[-1:]
        text = self._text[: len(self._text) - len(kept)]
        self._text = kept
        return text


async def test_take_gives_all_that_gathered() -> None:
    stream = TokenStream()
    stream.push(Tokens([1]), None)
    stream.push(Tokens([2, 3]), None)
    assert await stream.take() == Delta("", Tokens([1, 2, 3]))
    stream.push(Tokens([4]), END)
    assert stream.ended
    assert await stream.take() == Delta("", Tokens([4]), END)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1000])
async def test_however_much_gathers_it_comes_whole_and_in_order(count: int) -> None:
    """With all that is known of each token."""
    stream = TokenStream()
    for _ in range(2):
        for token in range(count):
            stream.push(Tokens([token], logprobs=[-float(token)]), None)
        logprobs = [-float(token) for token in range(count)]
        assert await stream.take() == Delta("", Tokens(list(range(count)), logprobs=logprobs))


async def test_take_waits_and_wakes() -> None:
    stream = TokenStream()
    for tokens in (Tokens([1]), Tokens([2])):
        taken = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        assert not taken.done()
        stream.push(tokens, None)
        assert await taken == Delta("", tokens)
    taken = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.push(NOTHING, END)
    assert await taken == Delta("", NOTHING, END)


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    stream = TokenStream()
    stream.push(Tokens([1]), None)
    stream.fail(EngineLost("gone"))
    assert stream.ended
    assert await stream.take() == Delta("", Tokens([1]))
    with pytest.raises(EngineLost):
        await stream.take()


async def test_an_error_wakes_who_waits() -> None:
    stream = TokenStream()
    taken = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.fail(EngineLost("gone"))
    with pytest.raises(EngineLost):
        await taken


async def test_an_error_after_the_end_does_nothing() -> None:
    stream = TokenStream()
    stream.push(Tokens([1]), END)
    stream.fail(EngineLost("gone"))
    assert await stream.take() == Delta("", Tokens([1]), END)


def test_pushing_after_the_end_is_our_bug() -> None:
    for end in (lambda s: s.push(NOTHING, END), lambda s: s.fail(EngineLost("gone"))):
        stream = TokenStream()
        end(stream)
        with pytest.raises(AssertionError):
            stream.push(Tokens([1]), None)


async def test_a_sink_that_does_not_search_gets_tokens_when_the_client_takes_them() -> None:
    sink = Letters()
    stream = TokenStream(sink)
    assert stream.scanner is None
    stream.push(Tokens([0]), None)
    stream.push(Tokens([1, 2]), None)
    assert not sink.pushed
    assert await stream.take() == Delta("ab", Tokens([0, 1, 2]))
    assert sink.pushed == [[0, 1, 2]], "all at once"
    stream.push(Tokens([3]), END)
    assert await stream.take() == Delta("cd.", Tokens([3]), END)


async def test_a_sink_that_searches_gets_tokens_from_the_core_alone() -> None:
    """Its text waits in it until the client takes what the core made of the tokens."""
    sink = Letters(stop="c")
    stream = TokenStream(sink)
    assert stream.scanner is sink
    assert sink.push([0]) is None
    stream.push(Tokens([0]), None)
    assert await stream.take() == Delta("", Tokens([0]))
    assert sink.push([1, 2, 3]) == 2
    stop = Finish(FinishReason.STOP, Usage(3, 1, 3))
    stream.push(Tokens([1, 2]), stop)
    assert await stream.take() == Delta("ab.", Tokens([1, 2]), stop, "c")
    assert sink.pushed == [[0], [1, 2, 3]]


async def test_text_that_was_held_back_comes_with_an_end_without_tokens() -> None:
    stream = TokenStream(Letters())
    stream.push(Tokens([0, 1]), None)
    assert await stream.take() == Delta("a", Tokens([0, 1]))
    stream.push(NOTHING, END)
    assert await stream.take() == Delta("b.", NOTHING, END)


@pytest.mark.parametrize("seed", range(60))
async def test_each_token_is_told_with_its_own_origin_whatever_has_gathered(seed: int) -> None:
    """Also through the messages that carry it; the last of them has the text."""
    chance = random.Random(seed)
    stream = TokenStream()
    origins = [Origin(digest, "x", weights_name=digest.upper()) for digest in "abc"]
    pushed: list[tuple[int, str]] = []
    told: list[tuple[int, str]] = []
    last = ""

    async def take() -> None:
        nonlocal last
        delta = await stream.take()
        messages = [message.delta for message in deltas(replace(delta, text="t" * 3))]
        assert [message.text for message in messages[:-1]] == [""] * (len(messages) - 1)
        for message in messages:
            if message.HasField("origin"):
                assert message.origin.weights_digest != last, "told again"
                last = message.origin.weights_digest
            told.extend((token, last) for token in message.token_ids)

    for number in range(40):
        origin = chance.choice(origins)
        stream.made_with(origin)
        count = chance.randint(1, 3)
        stream.push(Tokens([number] * count), None)
        pushed += [(number, origin.weights_digest)] * count
        if chance.random() < 0.4:
            await take()
    stream.push(Tokens([]), END)
    await take()
    assert told == pushed
