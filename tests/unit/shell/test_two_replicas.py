"""Two replicas, in virtual time: where requests go, and what one's loss costs the other."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from control_plane.core.errors import QueueFull
from control_plane.core.events import FinishReason
from control_plane.core.plan import StepPlan
from control_plane.core.request import RequestId
from control_plane.shell.engine import DuplicateRequest, EngineDraining, EngineLost
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream
from control_plane.shell.workers import away_seconds
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Answer, Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

PROMPT = [5, 6, 7, 8, 9]
STEP_SECONDS = 0.01


def workers(**changes: Any) -> list[FakeWorker]:
    return [FakeWorker(Machine(**changes), lambda: STEP_SECONDS) for _ in range(2)]


def submit_many(rig: Rig, count: int, max_tokens: int = 30) -> list[Answer]:
    """Requests that their seeds tell apart, 1 to `count`."""
    return [
        rig.submit(request(f"r{seed}", PROMPT, max_tokens, seed=seed))
        for seed in range(1, count + 1)
    ]


def seeds_of(worker: FakeWorker) -> set[int]:
    """Of the requests that a worker was given."""
    return {added.seed for plan in worker.machine.executed_plans for added in plan.added}


def lose(worker: FakeWorker) -> None:
    worker.reachable = False
    worker.break_connection()


def test_requests_are_shared_out_and_each_runs_in_one_place() -> None:
    async def main(loop: VirtualLoop) -> None:
        both = workers()
        async with running(loop, both) as rig:
            answers = submit_many(rig, 8, max_tokens=20)
            await rig.settled(*answers)
            for seed, answer in enumerate(answers, start=1):
                assert answer.tokens == expected_tokens(PROMPT, 20, seed)
            first, second = map(seeds_of, both)
            assert len(first) == len(second) == 4
            assert first | second == set(range(1, 9))

    run_virtual(main)


def test_a_request_goes_where_there_is_more_room() -> None:
    async def main(loop: VirtualLoop) -> None:
        small, large = both = workers()
        large.machine.block_count *= 2
        async with running(loop, both) as rig:
            answers = submit_many(rig, 1)
            await rig.settled(*answers)
            assert not seeds_of(small)
            assert seeds_of(large) == {1}

    run_virtual(main)


def test_the_loss_of_one_does_not_disturb_the_other() -> None:
    class Noting(FakeWorker):
        """Notes when it was sent plans."""

        def __init__(self, loop: VirtualLoop) -> None:
            super().__init__(Machine(max_sequence_token_count=1000), lambda: STEP_SECONDS)
            self.machine.block_count = 1000
            self.sent_at: list[float] = []
            self._loop = loop

        async def send(self, message: StepPlan) -> None:
            self.sent_at.append(self._loop.time())
            await super().send(message)

    async def main(loop: VirtualLoop) -> None:
        lost, kept = both = [Noting(loop), Noting(loop)]
        async with running(loop, both) as rig:
            answers = submit_many(rig, 4, max_tokens=500)
            await until(lambda: all(len(answer.tokens) >= 10 for answer in answers))
            lose(lost)
            await asyncio.sleep(1.0)
            assert rig.fleet.ready
            late = rig.submit(request("late", PROMPT, 10, seed=9))
            await rig.settled(late)
            assert 9 in seeds_of(kept), "what comes meanwhile goes to the other"
            await asyncio.sleep(1.0)
            lost.reachable = True
            await rig.settled(*answers)
            for seed, answer in enumerate(answers, start=1):
                assert answer.tokens == expected_tokens(PROMPT, 500, seed)
            gaps = [after - before for before, after in pairwise(kept.sent_at)]
            assert max(gaps) < 2 * STEP_SECONDS
            assert rig.readiness == [True]
            assert seeds_of(lost) & seeds_of(kept), "what was lost has gone on elsewhere"

    run_virtual(main)


def test_patience_ends_only_without_any_worker() -> None:
    async def main(loop: VirtualLoop) -> None:
        lost, kept = both = workers()
        async with running(loop, both, settings(loss_patience=5.0)) as rig:
            answers = submit_many(rig, 4)
            await until(lambda: all(answer.tokens for answer in answers))
            lose(lost)
            await rig.settled(*answers)
            for seed, answer in enumerate(answers, start=1):
                assert answer.tokens == expected_tokens(PROMPT, 30, seed)
            await asyncio.sleep(5.0)
            model = rig.fleet.served_model()
            assert model is not None, "one still serves"
            assert away_seconds(rig.serving()) == 0.0
            await rig.settled(rig.submit(request("after", PROMPT, 3)))
            lose(kept)
            await asyncio.sleep(6.0)
            assert rig.fleet.served_model() is None
            assert 5.0 <= away_seconds(rig.serving()) <= 6.0, "since the last was lost"
            with pytest.raises(EngineLost):
                rig.submit(request("none", PROMPT, 3))
            assert rig.readiness == [True, False]

    run_virtual(main)


def test_it_is_ready_with_the_first_worker() -> None:
    async def main(loop: VirtualLoop) -> None:
        here, late = both = workers()
        late.reachable = False
        rig = Rig(loop, both, settings(), 0)
        task = asyncio.create_task(rig.fleet.run())
        async with rig.group:
            await until(lambda: rig.fleet.ready)
            answers = submit_many(rig, 3)
            await rig.settled(*answers)
            assert seeds_of(here) == {1, 2, 3}
            late.reachable = True
            await rig.attached()
            assert rig.readiness == [True]
            task.cancel()
            await asyncio.wait([task])

    run_virtual(main)


def test_what_one_can_not_hold_goes_to_the_other() -> None:
    """The fleet's length is the larger one: a longer request finds its place."""

    async def main(loop: VirtualLoop) -> None:
        short, long = both = workers()
        short.machine.max_sequence_token_count = 16
        short.machine.block_count = 1000
        async with running(loop, both) as rig:
            model = rig.fleet.served_model()
            assert model is not None and model.max_sequence_token_count == 64
            prompt = list(range(2, 32))
            answer = rig.submit(request("long", prompt, 5))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(prompt, 5)
            assert not seeds_of(short) and seeds_of(long)

    run_virtual(main)


def test_a_full_queue_is_said_when_both_are_full() -> None:
    async def main(loop: VirtualLoop) -> None:
        chosen = ReplicaSettings(scheduling=SchedulingSettings(max_waiting_count=2))
        async with running(loop, workers(max_sequence_count=1), chosen) as rig:
            answers = submit_many(rig, 6)  # on each one in the row and two that wait
            with pytest.raises(QueueFull):
                rig.submit(request("more", PROMPT, 3))
            with pytest.raises(QueueFull):
                rig.fleet.check_room()
            await rig.settled(*answers)

    run_virtual(main)


def test_requests_on_their_way_have_their_places() -> None:
    async def main(loop: VirtualLoop) -> None:
        chosen = ReplicaSettings(scheduling=SchedulingSettings(max_waiting_count=2))
        async with running(loop, workers(max_sequence_count=1), chosen) as rig:
            answers = submit_many(rig, 2)
            given_back = [rig.fleet.reserve() for _ in range(4)]
            for refusing in (rig.fleet.check_room, rig.fleet.reserve):
                with pytest.raises(QueueFull) as refused:
                    refusing()
                assert refused.value.retry_after >= 1.0
            given_back.pop()()
            rig.fleet.check_room()
            answers.append(rig.submit(request("late", PROMPT, 30, seed=9)))
            with pytest.raises(QueueFull):
                rig.fleet.check_room()
            for give_back in given_back:
                give_back()
            await rig.settled(*answers)
            for _ in range(6):
                rig.fleet.reserve()

    run_virtual(main)


def test_without_a_worker_there_is_nothing_to_be_full() -> None:
    async def main(loop: VirtualLoop) -> None:
        rig = Rig(loop, workers(), ReplicaSettings(), 0)
        for _ in range(5_000):
            rig.fleet.reserve()
        with pytest.raises(EngineLost):
            rig.fleet.submit(request("a", PROMPT, 3), TokenStream())

    run_virtual(main)


def test_a_drain_refuses_at_the_door() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, workers()) as rig:
            await rig.fleet.drain(1.0)
            with pytest.raises(EngineDraining):
                rig.fleet.check_room()

    run_virtual(main)


def test_a_name_that_runs_elsewhere_is_refused_and_a_cancel_finds_its_place() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, workers()) as rig:
            answers = submit_many(rig, 2)
            for name in ("r1", "r2"):
                with pytest.raises(DuplicateRequest):
                    rig.fleet.submit(request(name, PROMPT, 3), TokenStream())
            assert rig.fleet.finish(RequestId("r1"), FinishReason.CANCELLED)
            await rig.settled(*answers)
            first, second = answers
            assert first.finish is not None and second.finish is not None
            assert first.finish.reason is FinishReason.CANCELLED
            assert second.finish.reason is FinishReason.LENGTH

    run_virtual(main)


def test_a_drain_waits_for_both() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, workers()) as rig:
            answers = submit_many(rig, 4)
            await rig.fleet.drain(60.0)
            await rig.settled(*answers)
            assert loop.time() < 10.0
            for seed, answer in enumerate(answers, start=1):
                assert answer.tokens == expected_tokens(PROMPT, 30, seed)
            with pytest.raises(EngineDraining):
                rig.submit(request("late", PROMPT, 3))

    run_virtual(main)


def test_a_bug_in_one_ends_all() -> None:
    class Broken(FakeWorker):
        async def send(self, message: StepPlan) -> None:
            raise RuntimeError("a bug")

    async def main(loop: VirtualLoop) -> None:
        both = [Broken(Machine()), FakeWorker(Machine(), lambda: STEP_SECONDS)]
        rig = Rig(loop, both, settings(), 0)
        task = asyncio.create_task(rig.fleet.run())
        await rig.attached()
        async with rig.group:
            answers = submit_many(rig, 2)
            await asyncio.wait([task])
        assert all(isinstance(answer.error, EngineLost) for answer in answers)
        assert isinstance(task.exception(), RuntimeError)
        assert rig.readiness == [True, False]

    run_virtual(main)


def test_replicas_are_counted_apart() -> None:
    async def main(loop: VirtualLoop) -> None:
        lost, _ = both = workers()
        async with running(loop, both) as rig:
            answers = submit_many(rig, 4)
            await until(lambda: all(answer.tokens for answer in answers))
            lost.break_connection()
            await rig.settled(*answers)
            lines = rig.telemetry.render().decode().splitlines()
            assert 'twinplane_worker_losses_total{cause="unreachable",replica="0"} 1.0' in lines
            assert 'twinplane_worker_losses_total{cause="unreachable",replica="1"} 0.0' in lines
            assert 'twinplane_requests_submitted_total{replica="0"} 2.0' in lines
            assert 'twinplane_requests_submitted_total{replica="1"} 2.0' in lines

    run_virtual(main)
