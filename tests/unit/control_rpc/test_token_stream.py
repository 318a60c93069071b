"""The way from the driver to a client: nothing lost, nothing after the end."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.shell.engine import EngineLost
from control_plane.shell.stream import TokenStream

END = Finish(FinishReason.LENGTH, Usage(3, 1, 4))


class StopAt:
    """Completes a stop string with a certain token."""

    def __init__(self, token: int) -> None:
        self._token = token
        self.seen: list[int] = []

    def push(self, token_ids: list[int]) -> int | None:
        self.seen += token_ids
        return token_ids.index(self._token) + 1 if self._token in token_ids else None


async def test_take_gives_all_that_gathered() -> None:
    stream = TokenStream()
    assert not stream.push([1], None)
    assert not stream.push([2, 3], None)
    assert await stream.take() == ([1, 2, 3], None)
    assert not stream.push([4], END)
    assert stream.ended
    assert await stream.take() == ([4], END)


async def test_take_waits_and_wakes() -> None:
    stream = TokenStream()
    for push in ([1], [2]):
        taken = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        assert not taken.done()
        stream.push(push, None)
        assert await taken == (push, None)
    taken = asyncio.create_task(stream.take())
    await asyncio.sleep(0)
    stream.push([], END)
    assert await taken == ([], END)


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    stream = TokenStream()
    stream.push([1], None)
    stream.fail(EngineLost("gone"))
    assert stream.ended
    assert await stream.take() == ([1], None)
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
    stream.push([1], END)
    stream.fail(EngineLost("gone"))
    assert await stream.take() == ([1], END)


def test_pushing_after_the_end_is_our_bug() -> None:
    for end in (lambda s: s.push([], END), lambda s: s.fail(EngineLost("gone"))):
        stream = TokenStream()
        end(stream)
        with pytest.raises(AssertionError):
            stream.push([1], None)


async def test_a_match_drops_what_follows_and_counts_what_came() -> None:
    scanner = StopAt(7)
    stream = TokenStream(scanner)
    assert not stream.push([1, 2], None)
    assert stream.push([3, 7, 8], None)
    assert stream.push([9], None), "until the finish comes"
    assert not stream.push([10], Finish(FinishReason.CANCELLED, Usage(3, 1, 7), detail="x"))
    assert await stream.take() == (
        [1, 2, 3, 7],
        Finish(FinishReason.STOP, Usage(3, 1, 4)),
    )
    assert scanner.seen == [1, 2, 3, 7, 8], "nothing is scanned after the match"


async def test_a_match_within_the_last_tokens() -> None:
    stream = TokenStream(StopAt(7))
    assert not stream.push([7, 8], END)
    assert await stream.take() == ([7], Finish(FinishReason.STOP, Usage(3, 1, 1)))


async def test_a_stop_token_is_no_longer_the_reason_when_a_string_came_first() -> None:
    stream = TokenStream(StopAt(7))
    finish = Finish(FinishReason.STOP, Usage(3, 1, 2), stop_token_id=8)
    stream.push([7, 8], finish)
    assert (await stream.take())[1] == Finish(FinishReason.STOP, Usage(3, 1, 1))
