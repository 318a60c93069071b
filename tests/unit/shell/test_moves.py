"""Moves between replicas that a simulation found wrong, in virtual time."""

from __future__ import annotations

import asyncio
import random

import pytest

from control_plane.core.config import SchedulerConfig
from control_plane.core.fleet import Member, MemberState, relief
from control_plane.core.plan import WeightVersion
from control_plane.core.scheduler import Scheduler
from control_plane.core.succession import Traits
from tests.simulation.fake_machine import VOCABULARY, Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

PROMPT = [5, 6, 7, 8, 9]


def member(number: int) -> Member:
    config = SchedulerConfig(
        max_sequence_count=2, max_step_token_count=8, max_sequence_token_count=32,
        block_count=20, block_size=4, max_waiting_count=9,
    )  # fmt: skip
    core = Scheduler(config, 1, WeightVersion(1, "a" * 64))
    traits = Traits("a" * 64, "one", VOCABULARY, 32)
    return Member(number, core, traits, MemberState.ATTACHED)


@pytest.mark.parametrize("count", range(1, 9))
def test_nobody_comes_from_replicas_without_a_queue(count: int) -> None:
    """Seed 36: of three replicas, one gave away the last that waited, and all streams ended."""
    others = [member(number) for number in range(1, count + 1)]
    assert relief(member(0), others, may_cross=False) is None


@pytest.mark.parametrize("seed", range(20))
def test_many_replicas_take_the_queue_of_one(seed: int) -> None:
    """Their places get free at different moments, so that the queue is empty before they are."""
    rng = random.Random(seed)

    async def main(loop: VirtualLoop) -> None:
        workers = [
            FakeWorker(Machine(max_sequence_count=rng.randrange(1, 4)), lambda: 0.01)
            for _ in range(rng.randrange(3, 7))
        ]
        async with running(loop, workers) as rig:
            asked = [
                request(f"r{number}", PROMPT, rng.randrange(1, 20), seed=number)
                for number in range(30)
            ]
            answers = [rig.submit(own) for own in asked]
            await rig.settled(*answers)
            for own, answer in zip(asked, answers, strict=True):
                right = expected_tokens(PROMPT, own.stop.max_tokens, own.seed)
                assert answer.tokens == right and answer.error is None

    run_virtual(main)


@pytest.mark.parametrize("patience", [0.1, 0.2, 1.0, 3.0, 3.5, 4.0])
@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_impatience_ends_nobody_whom_another_can_take(patience: float, how: str) -> None:
    """Seed 53: a silent worker is lost since its last sign of life, which was long ago already."""

    async def main(loop: VirtualLoop) -> None:
        workers = [FakeWorker(Machine(), lambda: 0.05) for _ in range(2)]
        async with running(loop, workers, settings(loss_patience=patience)) as rig:
            answers = [rig.submit(request(f"r{n}", PROMPT, 30, seed=n)) for n in range(4)]
            await until(lambda: all(answer.tokens for answer in answers))
            if how == "hangs":
                workers[0].freeze()
            else:
                workers[0].kill()
            await rig.settled(*answers)
            for seed, answer in enumerate(answers):
                assert answer.error is None
                assert answer.tokens == expected_tokens(PROMPT, 30, seed)
            await asyncio.sleep(20.0)
            assert [stats.running for stats in map(rig.stats, (0, 1))] == [0, 0]

    run_virtual(main)


def moved_counts(rig: Rig) -> list[int]:
    return [rig.stats(number).moved_out for number in range(len(rig.fleet.replicas))]


@pytest.mark.parametrize(
    ("away_seconds", "moves"),
    [((0.0,), False), ((0.1,), False), ((0.1, 0.2), False), ((0.5,), True)],
    ids=["at once", "soon", "soon, and again", "not soon"],
)
def test_a_connection_that_is_soon_whole_moves_nobody(
    away_seconds: tuple[float, ...], moves: bool
) -> None:
    """Each loss has a grace of its own, however soon it comes after the last."""

    async def main(loop: VirtualLoop) -> None:
        workers = [FakeWorker(Machine(), lambda: 0.02) for _ in range(2)]
        async with running(loop, workers, settings(longest_retry_delay=0.05)) as rig:
            answers = [rig.submit(request(f"r{n}", PROMPT, 50, seed=n)) for n in range(2)]
            await until(lambda: all(answer.tokens for answer in answers))
            for seconds in away_seconds:
                workers[0].reachable = False
                workers[0].break_connection()
                await asyncio.sleep(seconds)
                workers[0].reachable = True
                await rig.attached()
            await rig.settled(*answers)
            assert moved_counts(rig) == [int(moves), 0]
            for seed, answer in enumerate(answers):
                assert answer.tokens == expected_tokens(PROMPT, 50, seed)

    run_virtual(main)


@pytest.mark.parametrize("how", ["comes back", "joins"])
def test_a_newcomer_takes_what_the_lost_had(how: str) -> None:
    """Nobody could take it when its worker was lost."""

    async def main(loop: VirtualLoop) -> None:
        workers = [FakeWorker(Machine(), lambda: 0.02) for _ in range(2)]
        async with running(loop, workers) as rig, asyncio.timeout(60.0):
            answers = [rig.submit(request(f"r{n}", PROMPT, 30, seed=n)) for n in range(4)]
            await until(lambda: all(answer.tokens for answer in answers))
            for worker in workers:
                worker.kill()
            await asyncio.sleep(5.0)
            if how == "comes back":
                workers[1].reachable = True
            else:
                rig.fleet.join(FakeWorker(Machine(name="new"), lambda: 0.02))
            await rig.settled(*answers)
            for seed, answer in enumerate(answers):
                assert answer.error is None
                assert answer.tokens == expected_tokens(PROMPT, 30, seed)

    run_virtual(main)


def test_who_waits_goes_where_a_place_gets_free() -> None:
    """When it gets free, not when its own replica has one."""

    async def main(loop: VirtualLoop) -> None:
        workers = [FakeWorker(Machine(max_sequence_count=1), lambda: 0.02) for _ in range(2)]
        async with running(loop, workers) as rig:
            long, short, waiting = (
                rig.submit(request(f"r{seed}", PROMPT, count, seed=seed))
                for seed, count in enumerate((50, 20, 20))
            )
            await until(lambda: rig.stats(0).waiting == 1)
            await rig.settled(short)
            await rig.settled(waiting)
            assert not long.end_count
            assert moved_counts(rig) == [1, 0]
            await rig.settled(long)

    run_virtual(main)


@pytest.mark.parametrize("loses", [False, True])
def test_a_fleet_that_has_ended_leaves_no_timer(loses: bool) -> None:
    """Also not of the grace of a worker that was lost just before."""

    async def main(loop: VirtualLoop) -> None:
        workers = [FakeWorker(Machine(), lambda: 0.02) for _ in range(2)]
        async with running(loop, workers) as rig:
            answers = [rig.submit(request(f"r{n}", PROMPT, 50, seed=n)) for n in range(2)]
            await until(lambda: all(answer.tokens for answer in answers))
            if loses:
                workers[0].kill()
                await until(lambda: not rig.fleet.replicas[0].attached)
        assert all(answer.error is not None for answer in answers)
        assert loop.timer_count() == 0

    run_virtual(main)
