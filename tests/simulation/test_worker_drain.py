"""SIGTERM on a worker, in virtual time: it says so, its sequences move, nothing is lost."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.core.fleet import MemberState
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Answer, Rig, request, running, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread

STEP_SECONDS = 0.02
DRAIN_SECONDS = 30.0


def fleet(count: int, **geometry: int) -> list[FakeWorker]:
    return [
        FakeWorker(Machine(max_sequence_count=8, **geometry), lambda: STEP_SECONDS)
        for _ in range(count)
    ]


def submit(rig: Rig, seeds: range, tokens: int = 40) -> dict[int, Answer]:
    return {
        seed: rig.submit(
            request(f"r{seed}", [5, 6, 2 + seed % 90], tokens, seed=seed, arrival=seed / 1e3)
        )
        for seed in seeds
    }


def check(answers: dict[int, Answer], tokens: int = 40) -> None:
    for seed, answer in answers.items():
        assert (answer.tokens, answer.error) == (
            expected_tokens([5, 6, 2 + seed % 90], tokens, seed),
            None,
        )


@pytest.mark.parametrize("milliseconds", spread(range(5, 700, 31), 5))
def test_its_sequences_move_and_it_leaves(milliseconds: int) -> None:
    async def main(loop: VirtualLoop) -> None:
        leaving, _ = both = fleet(2)
        async with running(loop, both) as rig:
            free = [rig.stats(number).kv_free_tokens for number in (0, 1)]
            answers = submit(rig, range(1, 9), 60)
            await asyncio.sleep(milliseconds / 1000)
            told = loop.time()
            await leaving.terminate(DRAIN_SECONDS)
            assert loop.time() - told < 0.3, "it need not wait for what others can do"
            assert not leaving.machine.rows
            assert rig.stats(0).inflight == 0
            await rig.settled(*answers.values())
            check(answers, 60)
            leaving.reachable = True  # its successor
            await rig.attached()
            more = submit(rig, range(11, 19))
            await rig.settled(*more.values())
            check(more)
            assert rig.stats(0).generated_tokens and rig.readiness == [True]
            for number, before in enumerate(free):
                stats = rig.stats(number)
                assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)
                assert stats.kv_free_tokens + stats.kv_cached_tokens == before

    run_virtual(main)


def test_who_comes_meanwhile_goes_elsewhere() -> None:
    async def main(loop: VirtualLoop) -> None:
        leaving, _ = both = fleet(2)
        async with running(loop, both) as rig:
            answers = submit(rig, range(1, 5))
            await asyncio.sleep(0.1)
            leaving._is_leaving = True
            replica = rig.fleet.replicas[0]
            await until(lambda: replica.state is MemberState.DRAINING)
            submitted = rig.stats(0).submitted
            more = submit(rig, range(11, 20))
            assert rig.stats(0).submitted == submitted
            await rig.settled(*answers.values(), *more.values())
            check(answers | more)

    run_virtual(main)


def test_whom_nobody_else_can_take_ends_where_it_is() -> None:
    async def main(loop: VirtualLoop) -> None:
        long = FakeWorker(Machine(max_sequence_token_count=64), lambda: STEP_SECONDS)
        short = FakeWorker(Machine(max_sequence_token_count=20), lambda: STEP_SECONDS)
        async with running(loop, [long, short]) as rig:
            answer = rig.submit(request("a", [5, 6, 7], 50, seed=3))
            await asyncio.sleep(0.2)
            told = loop.time()
            await long.terminate(DRAIN_SECONDS)
            assert loop.time() - told > 0.5
            await rig.settled(answer)
            assert answer.tokens == expected_tokens([5, 6, 7], 50, 3)

    run_virtual(main)


def test_alone_it_serves_on_for_its_drain() -> None:
    """New requests, too: nobody else is there."""

    async def main(loop: VirtualLoop) -> None:
        (worker,) = fleet(1, block_count=129)
        async with running(loop, worker) as rig:
            answers = submit(rig, range(1, 4), 50)
            await asyncio.sleep(0.1)
            leaving = asyncio.create_task(worker.terminate(2.0))
            await asyncio.sleep(0.2)
            more = submit(rig, range(11, 14), 50)
            await asyncio.sleep(1.5)
            assert all(answer.end_count for answer in (*answers.values(), *more.values()))
            check(answers | more, 50)
            assert worker.attach_count == 1
            late = submit(rig, range(21, 23), 50)
            await leaving
            await asyncio.sleep(1.0)
            worker.reachable = True
            await rig.settled(*late.values())
            check(late, 50)

    run_virtual(main)


@pytest.mark.parametrize("seed", spread(range(2), 1))
def test_a_rolling_restart_loses_nothing(seed: int) -> None:
    """Twenty times, one after another, under 32 streams at a time."""

    async def main(loop: VirtualLoop) -> None:
        workers = fleet(3, block_count=129)
        async with running(loop, workers, seed=seed) as rig:
            over = asyncio.Event()
            count = 0

            async def client(number: int) -> None:
                nonlocal count
                while not over.is_set():
                    count += 1
                    answers = submit(rig, range(count, count + 1), 20 + number % 7)
                    (answer,) = answers.values()
                    while True:  # rarer looks than `settled` has keep the test quick
                        await asyncio.sleep(0.03)
                        if answer.end_count:
                            break
                    check(answers, 20 + number % 7)

            clients = [asyncio.create_task(client(number)) for number in range(32)]
            for turn in range(20):
                await asyncio.sleep(0.11 * (seed + 1))
                worker = workers[turn % 3]
                told = loop.time()
                await worker.terminate(DRAIN_SECONDS)
                assert loop.time() - told < 2.0
                await asyncio.sleep(0.3)
                worker.reachable = True
                await rig.attached()
            over.set()
            await asyncio.wait(clients)
            for done in clients:
                done.result()
            assert rig.readiness == [True]
            for number in range(3):
                stats = rig.stats(number)
                assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)

    run_virtual(main)


def test_all_of_them_at_once() -> None:
    """Each goes on with what it has; the first successor takes all."""

    async def main(loop: VirtualLoop) -> None:
        workers = fleet(2)
        async with running(loop, workers) as rig:
            answers = submit(rig, range(1, 9), 60)
            await asyncio.sleep(0.2)
            await asyncio.gather(*(worker.terminate(0.5) for worker in workers))
            await asyncio.sleep(1.0)
            workers[0].reachable = True
            await rig.settled(*answers.values())
            check(answers, 60)

    run_virtual(main)
