"""A worker that is silent is told from one that is busy, slow to answer or only idle."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from control_plane.core.plan import Row, ScheduledRows, StepPlan, StepResult, WeightVersion
from control_plane.core.tokens import Tokens
from control_plane.shell.heartbeat import Heartbeat
from control_plane.shell.ports import RefusalReason, WorkerLost, WorkerRefused, WorkerSilent
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import request, running, settings
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread

LIMIT = 2.4
WEIGHTS = WeightVersion(1, "w")
LATEST = LIMIT * 6 / 5
Ping = Callable[[], Awaitable[None]]


class Pinged(FakeWorker):
    """A worker whose answers to pings a test chooses."""

    def __init__(self, answer: Ping) -> None:
        super().__init__(Machine())
        self._answer = answer
        self.ping_count = 0

    async def ping(self) -> None:
        self.ping_count += 1
        await self._answer()


async def no_answer() -> None:
    await asyncio.Event().wait()


async def answer_at_once() -> None:
    """Nothing to wait for."""


async def broken() -> None:
    raise WorkerLost("UNAVAILABLE")


async def refused() -> None:
    raise WorkerRefused(RefusalReason.INTERNAL, "too many calls")


def answer_after(seconds: float) -> Ping:
    return lambda: asyncio.sleep(seconds)


async def outcome(heartbeat: Heartbeat, seconds: float) -> Exception | None:
    """What ends work of so many seconds."""
    try:
        await heartbeat.watched(asyncio.sleep(seconds))
    except WorkerSilent as silent:
        return silent
    return None


@pytest.mark.parametrize("ping", [no_answer, broken, answer_after(LATEST)])
def test_no_answer_is_a_silence(ping: Ping) -> None:
    async def main(loop: VirtualLoop) -> None:
        silent = await outcome(Heartbeat(Pinged(ping), LIMIT, loop.time), 60.0)
        assert isinstance(silent, WorkerSilent)
        assert silent.seconds == LIMIT
        assert LIMIT - 0.01 <= loop.time() <= LATEST

    run_virtual(main)


@pytest.mark.parametrize("ping", [answer_at_once, refused, *map(answer_after, (0.1, 1.0, 1.8))])
def test_any_answer_is_a_sign_of_life(ping: Ping) -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = Pinged(ping)
        assert await outcome(Heartbeat(worker, LIMIT, loop.time), 3600.0) is None
        assert worker.ping_count <= 3600 / LIMIT * 5 / 2 + 1, "every other look at most"

    run_virtual(main)


def test_an_idle_worker_is_asked_seldom_and_one_with_work_at_once() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = Pinged(answer_at_once)
        heartbeat = Heartbeat(worker, LIMIT, loop.time)

        async def idle_and_then_busy() -> None:
            await asyncio.sleep(600.0)
            assert 600 / LIMIT * 5 / 14 <= worker.ping_count <= 600 / LIMIT * 5 / 10
            worker._answer = no_answer
            heartbeat.sends(StepPlan(1, 1, WEIGHTS, [], [], ScheduledRows([Row(0)], [0], [1])))
            began = loop.time()
            with pytest.raises(asyncio.CancelledError):
                await asyncio.sleep(600.0)
            assert loop.time() - began <= LIMIT * 8 / 5, "an old answer counts for nothing"

        with pytest.raises(WorkerLost):
            await heartbeat.watched(idle_and_then_busy())

    run_virtual(main)


def test_an_idle_worker_that_falls_silent_is_noticed() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = Pinged(answer_at_once)

        async def fall_silent() -> None:
            await asyncio.sleep(100.0)
            worker._answer = no_answer
            await asyncio.sleep(600.0)

        with pytest.raises(WorkerSilent):
            await Heartbeat(worker, LIMIT, loop.time).watched(fall_silent())
        assert loop.time() <= 100.0 + 4 * LIMIT

    run_virtual(main)


def test_nothing_is_asked_while_results_come() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = Pinged(no_answer)
        heartbeat = Heartbeat(worker, LIMIT, loop.time)

        async def results() -> None:
            result = StepResult(1, 1, [], [], Tokens([]))
            for _ in range(600):
                await asyncio.sleep(0.1)
                heartbeat.heard(result)

        await heartbeat.watched(results())
        assert worker.ping_count == 0

    run_virtual(main)


@pytest.mark.parametrize("seconds", [1.0, 10.0, 3600.0])
@pytest.mark.parametrize("at", [0.0, 0.3, 0.8, 1.5, 2.9, 5.0])
def test_a_pause_of_our_own_is_no_silence(seconds: float, at: float) -> None:
    """As after SIGSTOP: every timer is due at once, and the answer is still unread."""

    async def main(loop: VirtualLoop) -> None:
        worker = Pinged(answer_after(0.05))
        work = asyncio.create_task(outcome(Heartbeat(worker, LIMIT, loop.time), seconds + 20.0))
        await asyncio.sleep(at)
        loop._now += seconds
        assert await work is None

    run_virtual(main)


def test_what_the_work_raises_is_raised() -> None:
    async def main(loop: VirtualLoop) -> None:
        async def fail() -> None:
            await asyncio.sleep(5.0)
            raise RuntimeError("a bug")

        with pytest.raises(RuntimeError, match="a bug"):
            await Heartbeat(Pinged(answer_at_once), LIMIT, loop.time).watched(fail())
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtual(main)


def test_results_are_signs_of_life_enough() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = Pinged(no_answer)
        worker.step_seconds = lambda: 0.4
        async with running(loop, worker) as rig:
            answer = rig.submit(request("a", [1, 2, 3], 50))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens([1, 2, 3], 50)
            assert (worker.attach_count, worker.ping_count) == (1, 0)

    run_virtual(main)


@pytest.mark.parametrize("step_seconds", [4.0, 30.0])
def test_a_long_step_is_no_silence(step_seconds: float) -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: step_seconds)
        async with running(loop, worker, settings(loss_patience=5.0)) as rig:
            answer = rig.submit(request("a", [1, 2, 3], 3))
            await asyncio.sleep(4 * step_seconds)
            assert answer.tokens == expected_tokens([1, 2, 3], 3)
            assert rig.readiness == [True]
            assert worker.attach_count == 1

    run_virtual(main)


def test_a_worker_frozen_while_a_plan_is_sent_is_lost_all_the_same() -> None:
    """The transport is full, so the send waits for ever."""

    class Stuck(FakeWorker):
        async def send(self, plan: StepPlan) -> None:
            await self.running.wait()
            await super().send(plan)

    async def main(loop: VirtualLoop) -> None:
        worker = Stuck(Machine(), lambda: 0.1)
        async with running(loop, worker) as rig:
            worker.freeze()
            answer = rig.submit(request("a", [1, 2, 3], 5))
            await asyncio.sleep(5.0)
            assert rig.readiness == [True, False]
            worker.thaw()
            await rig.settled(answer)
            assert answer.tokens == expected_tokens([1, 2, 3], 5)
            assert rig.readiness == [True, False, True]

    run_virtual(main)


@pytest.mark.parametrize("patience", [0.5, 2.0, 5.0, 20.0, 45.0])
def test_the_patience_counts_from_the_last_sign_of_life(patience: float) -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.1)
        async with running(loop, worker, settings(loss_patience=patience)) as rig:
            answer = rig.submit(request("a", [1, 2, 3], 30))
            await asyncio.sleep(1.0)
            worker.freeze()
            await rig.settled(answer)
            failed_after = loop.time() - 1.0
            assert failed_after == pytest.approx(max(patience, LIMIT), abs=0.9)
            stats = rig.stats()
            assert (stats.running, stats.waiting, stats.inflight) == (0, 0, 0)
            assert stats.kv_active_tokens + stats.kv_free_tokens + stats.kv_cached_tokens == 0
            rendered = rig.telemetry.render().decode()
            assert 'twinplane_worker_up{replica="0"} 0.0' in rendered
            assert 'twinplane_kv_tokens{replica="0",state="free"} 0.0' in rendered

    run_virtual(main)


@pytest.mark.parametrize("restarts", [False, True], ids=["thaws", "another life comes"])
@pytest.mark.parametrize("tenths", spread(range(5, 200, 8), 7))
def test_streams_go_on_byte_for_byte_whenever_it_is_back(tenths: int, restarts: bool) -> None:
    seconds = tenths / 10

    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.05)
        async with running(loop, worker) as rig:
            free = rig.stats().kv_free_tokens
            prompts = [[5, 6, n] for n in range(6)]  # more than rows: some wait
            answers = [rig.submit(request(f"r{n}", p, 30)) for n, p in enumerate(prompts)]
            await asyncio.sleep(0.4)
            worker.freeze()
            await asyncio.sleep(seconds)
            if restarts:
                worker.machine.restart()
                worker.break_connection()
            worker.thaw()
            await rig.settled(*answers)
            for prompt, answer in zip(prompts, answers, strict=True):
                assert (answer.tokens, answer.error) == (expected_tokens(prompt, 30), None)
            if restarts or seconds > LATEST:
                assert rig.readiness == [True, False, True]
            elif seconds < LIMIT:
                assert rig.readiness == [True]
            stats = rig.stats()
            assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)
            assert stats.kv_free_tokens + stats.kv_cached_tokens == free

    run_virtual(main)
