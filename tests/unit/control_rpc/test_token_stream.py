"""The way from the driver to a client: nothing lost, nothing after the end."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.shell.engine import EngineLost
from control_plane.shell.stream import TokenStream

END = Finish(FinishReason.LENGTH, Usage(3, 1, 4))


async def test_take_gives_all_that_gathered() -> None:
    stream = TokenStream()
    stream.push([1], None)
    stream.push([2, 3], None)
    assert await stream.take() == ([1, 2, 3], None)
    stream.push([4], END)
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
