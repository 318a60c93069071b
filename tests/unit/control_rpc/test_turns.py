"""Turns to send: in order, in bursts, and with room between them for the worker's results."""

from __future__ import annotations

import asyncio
from itertools import pairwise

from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.core.tokens import Tokens
from control_plane.rpc.turns import BURST, Turns
from control_plane.shell.stream import Delta, TokenStream
from tests.simulation.virtual_time import VirtualLoop, run_virtual

COUNT = 5 * BURST


def ask(turns: Turns, count: int) -> list[asyncio.Future[None]]:
    """That many turns, asked for in order."""
    loop = asyncio.get_running_loop()
    asked: list[asyncio.Future[None]] = [loop.create_future() for _ in range(count)]
    for turn in asked:
        turns.ask(turn)
    return asked


async def granted_per_tick(asked: list[asyncio.Future[None]]) -> list[int]:
    """How many turns each tick of the loop granted, until all are; checks their order."""
    ticks: list[int] = []
    granted = 0
    while granted < len(asked):
        await asyncio.sleep(0)
        done = [turn.done() for turn in asked]
        assert done == sorted(done, reverse=True), "first come, first served"
        ticks.append(sum(done) - granted)
        granted = sum(done)
    return ticks


def test_few_turns_are_granted_at_once_and_without_a_timer() -> None:
    async def main(loop: VirtualLoop) -> None:
        ticks = await granted_per_tick(ask(Turns(), BURST))
        assert sum(ticks[:2]) == BURST, "in the very next tick"
        assert loop.time() == 0

    run_virtual(main)


def test_many_turns_come_in_bursts_with_rests_as_long_as_their_writes() -> None:
    async def main(loop: VirtualLoop) -> None:
        ticks = await granted_per_tick(ask(Turns(), COUNT))
        bursts = [index for index, count in enumerate(ticks) if count]
        assert [ticks[index] for index in bursts] == [BURST] * (COUNT // BURST)
        gaps = [after - before for before, after in pairwise(bursts)]
        # gRPC's bytes are read one a tick: as many ticks as writes, or they pile up.
        assert all(BURST <= gap <= 2 * BURST for gap in gaps), gaps
        assert loop.time() == 0, "no timer"

    run_virtual(main)


def test_who_asks_during_a_rest_waits_for_its_end() -> None:
    async def main(loop: VirtualLoop) -> None:
        turns = Turns()
        await granted_per_tick(ask(turns, BURST))
        [late] = ask(turns, 1)
        ticks = await granted_per_tick([late])
        assert BURST <= len(ticks) <= 2 * BURST, "writes never outrun the ticks"

    run_virtual(main)


async def test_cancelled_turns_cost_nobody_else_theirs() -> None:
    asked = ask(Turns(), 3 * BURST)
    left, stayed = asked[: 2 * BURST], asked[2 * BURST :]
    for turn in left:
        turn.cancel()
    ticks = await granted_per_tick(stayed)
    assert sum(ticks[:2]) == BURST, "as if they had never asked"


def test_the_loop_rests_and_sleeps_when_nobody_waits() -> None:
    async def main(loop: VirtualLoop) -> None:
        turns = Turns()
        for seconds in (1, 2):
            ticks = await granted_per_tick(ask(turns, BURST))
            assert sum(ticks[:2]) == BURST, "the pause after the burst before is long over"
            await asyncio.sleep(1)  # virtual time moves only while the loop has nothing to do
            assert loop.time() == seconds

    run_virtual(main)


async def test_a_client_that_leaves_while_it_waits_loses_nothing_for_the_next() -> None:
    turns = Turns()
    stream = TokenStream(gate=turns)
    for push_first in (True, False):
        if push_first:
            stream.push(Tokens([1]), None)
        taking = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait([taking])
        if not push_first:
            stream.push(Tokens([1]), None)
        assert await asyncio.wait_for(stream.take(), 60) == Delta("", Tokens([1]))


def test_a_step_never_waits_for_every_stream() -> None:
    """Clients that take a tick to write, and a worker whose answers take three: what a step
    brings joins what waits, in order, and the worker goes on long before all have written.
    """
    stream_count, step_count = 20 * BURST, 60
    finish = Finish(FinishReason.LENGTH, Usage(1, 0, step_count))

    async def main(loop: VirtualLoop) -> None:
        turns = Turns()
        streams = [TokenStream(gate=turns) for _ in range(stream_count)]
        writes = 0
        step_at_writes: list[int] = []

        async def client(stream: TokenStream) -> list[int]:
            nonlocal writes
            tokens: list[int] = []
            while True:
                delta = await stream.take()
                tokens += delta.tokens.ids
                writes += 1
                if delta.finish is not None:
                    return tokens
                await asyncio.sleep(0)

        clients = [asyncio.create_task(client(stream)) for stream in streams]
        await asyncio.sleep(0)
        for step in range(step_count):
            for stream in streams:
                stream.push(Tokens([step]), finish if step == step_count - 1 else None)
            step_at_writes.append(writes)
            for _ in range(3):
                await asyncio.sleep(0)
        between = [after - before for before, after in pairwise(step_at_writes)]
        assert max(between) <= BURST
        assert await asyncio.gather(*clients) == [list(range(step_count))] * stream_count
        assert writes < stream_count * step_count / 4, "messages grew instead of queues"

    run_virtual(main)
