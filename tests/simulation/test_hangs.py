"""A worker whose device hangs, in virtual time: found from the step it does not finish."""

from __future__ import annotations

import asyncio
import logging

import pytest

from control_plane.core.fleet import MemberState
from control_plane.core.progress import LEAST_SECONDS, TIMES
from control_plane.shell.engine import EngineLost
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Answer, Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread

STEP_SECONDS = 0.02
LATE = 0.05
"""How much later than promised a look may be, and a step that begins anew takes."""


def fleet(count: int, seconds: float = STEP_SECONDS) -> list[FakeWorker]:
    return [FakeWorker(Machine(max_sequence_count=8), lambda: seconds) for _ in range(count)]


def submit(rig: Rig, count: int, tokens: int = 40) -> dict[int, Answer]:
    return {
        seed: rig.submit(request(f"r{seed}", [5, 6, seed], tokens, seed=seed, arrival=seed / 1e3))
        for seed in range(1, count + 1)
    }


def check(answers: dict[int, Answer], tokens: int = 40) -> None:
    for seed, answer in answers.items():
        assert (answer.tokens, answer.error) == (expected_tokens([5, 6, seed], tokens, seed), None)


def check_books(rig: Rig, free: list[int]) -> None:
    for number, before in enumerate(free):
        stats = rig.stats(number)
        assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)
        assert stats.kv_free_tokens + stats.kv_cached_tokens == before


@pytest.mark.parametrize("how", ["hang", "freeze"])
@pytest.mark.parametrize("milliseconds", spread(range(250, 700, 37), 4))
def test_streams_leave_a_hung_worker_within_three_seconds(milliseconds: int, how: str) -> None:
    async def main(loop: VirtualLoop) -> None:
        hung, other = both = fleet(2)
        async with running(loop, both) as rig:
            free = [rig.stats(number).kv_free_tokens for number in (0, 1)]
            answers = submit(rig, 8)
            await asyncio.sleep(milliseconds / 1000)
            getattr(hung, how)()
            struck = loop.time()
            await until(lambda: rig.stats(1).moved_in > 0)
            assert loop.time() - struck <= 3.0
            await rig.settled(*answers.values())
            check(answers)
            assert other.attach_count == 1, "the other one was left alone"
            hung.go_on()
            hung.thaw()
            await rig.attached()
            await asyncio.sleep(1.0)
            check_books(rig, free)

    run_virtual(main)


@pytest.mark.parametrize("step_seconds", [0.7, 2.0, 9.0])
def test_slow_steps_have_five_times_what_they_take(step_seconds: float) -> None:
    async def main(loop: VirtualLoop) -> None:
        hung, _ = both = fleet(2, step_seconds)
        async with running(loop, both) as rig:
            answers = submit(rig, 4, 20)
            await asyncio.sleep(3.5 * step_seconds)
            hung.hang()
            struck = loop.time()
            await until(lambda: rig.stats(1).moved_in > 0)
            waited = loop.time() - struck
            limit = max(LEAST_SECONDS, TIMES * step_seconds)
            assert limit - step_seconds - LATE <= waited <= limit + LATE
            await rig.settled(*answers.values())
            check(answers, 20)

    run_virtual(main)


def test_a_worker_that_slows_down_is_left_in_peace() -> None:
    """Each step takes up to four times as long as the one before it."""

    async def main(loop: VirtualLoop) -> None:
        delays = iter([0.5, 0.5, 2.0, 6.0, 20.0, 60.0, 2.0, 0.5] + [0.01] * 100)
        worker = FakeWorker(Machine(), lambda: next(delays))
        async with running(loop, worker) as rig:
            answer = rig.submit(request("a", [5, 6, 7], 30))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens([5, 6, 7], 30)
            assert worker.attach_count == 1

    run_virtual(main)


def test_a_long_prefill_is_no_death() -> None:
    """Seconds for each token of a chunk, behind steps that took a moment."""

    async def main(loop: VirtualLoop) -> None:
        machine = Machine(max_step_token_count=256, max_sequence_token_count=600, block_count=300)
        seconds_of_token = 0.3
        worker = FakeWorker(machine)
        worker.step_seconds = lambda: (
            seconds_of_token
            * sum(worker._running.scheduled.token_counts if worker._running else ())
        )
        async with running(loop, worker) as rig:
            short = rig.submit(request("short", [5], 5))
            await rig.settled(short)
            prompt = [2 + index % 90 for index in range(512)]
            long = rig.submit(request("long", prompt, 5, seed=2))
            await rig.settled(long)
            assert long.tokens == expected_tokens(prompt, 5, 2)
            assert worker.attach_count == 1 and loop.time() > 150.0

    run_virtual(main)


def test_a_first_step_may_take_long_and_is_tried_longer_each_time() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 100.0 if worker.attach_count < 3 else 0.01)
        async with running(loop, worker) as rig:
            answer = rig.submit(request("a", [5, 6, 7], 30))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens([5, 6, 7], 30)
            assert worker.attach_count == 3

    run_virtual(main)


@pytest.mark.parametrize("seconds", [1.0, 10.0, 3600.0])
@pytest.mark.parametrize("at", [0.1, 0.5, 1.9, 3.3])
def test_a_jump_of_our_clock_is_no_hang(seconds: float, at: float) -> None:
    """As after SIGSTOP of the control plane: the results came, and are still unread."""

    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.4)
        async with running(loop, worker) as rig:
            answer = rig.submit(request("a", [5, 6, 7], 20))
            await asyncio.sleep(at)
            loop._now += seconds
            await rig.settled(answer)
            assert answer.tokens == expected_tokens([5, 6, 7], 20)
            assert worker.attach_count == 1

    run_virtual(main)


def test_a_hang_behind_a_jump_is_found() -> None:
    async def main(loop: VirtualLoop) -> None:
        hung, _ = both = fleet(2)
        async with running(loop, both) as rig:
            answers = submit(rig, 4)
            await asyncio.sleep(0.3)
            hung.hang()
            await asyncio.sleep(1.0)
            loop._now += 3600.0
            jumped = loop.time()
            await until(lambda: rig.stats(1).moved_in > 0)
            assert loop.time() - jumped <= 3.0
            await rig.settled(*answers.values())
            check(answers)

    run_virtual(main)


@pytest.mark.parametrize("how", ["hang", "freeze"])
def test_who_comes_meanwhile_goes_elsewhere(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """For half of the time the worker is suspect, and then lost. Each is told once."""
    caplog.set_level(logging.INFO)

    async def main(loop: VirtualLoop) -> None:
        hung, _ = both = fleet(2)
        async with running(loop, both) as rig:
            answers = submit(rig, 2)
            await asyncio.sleep(0.3)
            getattr(hung, how)()
            replica = rig.fleet.replicas[0]
            await until(lambda: replica.state is MemberState.SUSPECT)
            assert rig.fleet.ready
            submitted = rig.stats(0).submitted
            late = [rig.submit(request(f"late{n}", [7, 8, n], 9, seed=n)) for n in range(4)]
            assert rig.stats(0).submitted == submitted, "nobody is sent to a suspect"
            await until(lambda: replica.state is MemberState.LOST)
            await rig.settled(*late, *answers.values())
            check(answers)
            for number, answer in enumerate(late):
                assert answer.tokens == expected_tokens([7, 8, number], 9, number)

    run_virtual(main)
    changes = [
        (told["before"], told["now"])
        for told in (one.__dict__["fields"] for one in caplog.records if "changed" in one.msg)
        if told["replica"] == 0
    ]
    assert changes[1:4] == [("joining", "attached"), ("attached", "suspect"), ("suspect", "lost")]


def test_alone_it_is_waited_for_with_patience() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: STEP_SECONDS)
        async with running(loop, worker, settings(loss_patience=20.0)) as rig:
            answers = submit(rig, 3)
            await asyncio.sleep(0.3)
            worker.hang()
            await asyncio.sleep(12.0)
            assert not any(answer.end_count for answer in answers.values())
            worker.go_on()
            await rig.settled(*answers.values())
            check(answers)
            later = rig.submit(request("later", [5], 9))
            await asyncio.sleep(0.05)
            worker.hang()
            await rig.settled(later)
            assert isinstance(later.error, EngineLost)

    run_virtual(main)


def test_a_second_loss_does_not_fail_what_another_takes() -> None:
    """Patience counts for whom nobody can take."""

    async def main(loop: VirtualLoop) -> None:
        first, second, third = workers = fleet(3)
        async with running(loop, workers, settings(loss_patience=10.0)) as rig:
            answers = submit(rig, 9, 50)
            await asyncio.sleep(0.3)
            first.kill()
            await asyncio.sleep(0.5)
            second.kill()
            await asyncio.sleep(30.0)
            await rig.settled(*answers.values())
            check(answers, 50)
            late = rig.submit(request("late", [5], 9))
            await rig.settled(late)
            assert late.tokens == expected_tokens([5], 9)
            third.kill()
            with pytest.raises(EngineLost):
                await asyncio.sleep(11.0)
                rig.submit(request("none", [5], 9))

    run_virtual(main)


@pytest.mark.parametrize("gap", [0.0, 4.0, 9.0])
def test_patience_counts_from_when_the_last_usable_worker_went(gap: float) -> None:
    async def main(loop: VirtualLoop) -> None:
        first, second = both = fleet(2, 0.3)
        async with running(loop, both, settings(loss_patience=10.0)) as rig:
            answers = submit(rig, 4, 60)
            await asyncio.sleep(0.3)
            first.kill()
            await asyncio.sleep(gap)
            second.kill()
            killed = loop.time()
            await rig.settled(*answers.values())
            assert all(isinstance(answer.error, EngineLost) for answer in answers.values())
            assert loop.time() - killed == pytest.approx(10.0, abs=0.5)

    run_virtual(main)
