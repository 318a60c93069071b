"""A fleet of one replica with a fake worker, in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from control_plane.core.events import FinishReason
from control_plane.core.plan import StepPlan, StepResult
from control_plane.core.request import RequestId
from control_plane.shell.engine import (
    DuplicateRequest,
    EngineDraining,
    EngineLost,
    VocabularyMismatch,
)
from control_plane.shell.stream import TokenStream
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Rig, StopAt, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

PROMPT = [5, 6, 7, 8, 9]


def test_tokens_are_the_models() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine())) as rig:
            answer = rig.submit(request("a", PROMPT, 10))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPT, 10)
            assert answer.finish is not None
            assert answer.finish.reason is FinishReason.LENGTH
            assert answer.finish.usage.completion_tokens == 10

    run_virtual(main)


@pytest.mark.parametrize("synchronous", [False, True])
def test_many_requests_through_a_small_pool(synchronous: bool) -> None:
    """More requests than rows, more tokens than blocks: preempted, chunked, and still right."""

    async def main(loop: VirtualLoop) -> None:
        machine = Machine(max_sequence_count=3, block_count=17, max_step_token_count=8)
        chosen = settings(synchronous=synchronous)
        async with running(loop, FakeWorker(machine, lambda: 0.01), chosen) as rig:
            prompts = {f"r{n}": [2 + n, *range(2, 2 + 3 * n)] for n in range(9)}
            answers = {
                name: rig.submit(request(name, prompt, 20, seed=len(prompt)))
                for name, prompt in prompts.items()
            }
            await rig.settled(*answers.values())
            for name, prompt in prompts.items():
                assert answers[name].tokens == expected_tokens(prompt, 20, len(prompt)), name
            stats = rig.stats()
            assert stats.preemptions > 0, "the pool was meant to be too small"

    run_virtual(main)


def test_async_scheduling_keeps_two_plans_in_flight_and_sync_one() -> None:
    async def deepest(loop: VirtualLoop, synchronous: bool) -> int:
        depth, most = 0, 0

        class Counting(FakeWorker):
            async def send(self, plan: StepPlan) -> None:
                nonlocal depth, most
                depth += 1
                most = max(most, depth)
                await super().send(plan)

            async def receive(self) -> StepResult:
                nonlocal depth
                result = await super().receive()
                depth -= 1
                return result

        worker = Counting(Machine(), lambda: 0.01)
        async with running(loop, worker, settings(synchronous=synchronous)) as rig:
            await rig.settled(rig.submit(request("a", PROMPT, 10)))
        return most

    assert run_virtual(lambda loop: deepest(loop, False)) == 2
    assert run_virtual(lambda loop: deepest(loop, True)) == 1


def test_a_token_outside_the_vocabulary_never_reaches_the_worker() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine())
        async with running(loop, worker) as rig:
            with pytest.raises(VocabularyMismatch, match="tokens"):
                rig.submit(request("a", [5, 97], 3))
            assert not worker.machine.executed_plans

    run_virtual(main)


def test_cancel_frees_a_row_for_who_waits() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(max_sequence_count=1), lambda: 0.01)
        async with running(loop, worker) as rig:
            first = rig.submit(request("first", PROMPT, 50))
            waiting = rig.submit(request("waiting", PROMPT, 50))
            second = rig.submit(request("second", [9, 9], 3))
            await asyncio.sleep(0.1)
            assert rig.fleet.finish(RequestId("waiting"), FinishReason.CANCELLED)
            assert rig.fleet.finish(RequestId("first"), FinishReason.CANCELLED)
            assert not rig.fleet.finish(RequestId("first"), FinishReason.CANCELLED)
            await rig.settled(first, waiting, second)
            assert first.finish is not None and first.finish.reason is FinishReason.CANCELLED
            assert waiting.tokens == []
            assert second.tokens == expected_tokens([9, 9], 3)
            assert first.tokens == expected_tokens(PROMPT, len(first.tokens))
            await asyncio.sleep(0.1)
            assert not worker.machine.rows, "the worker still holds a row"

    run_virtual(main)


def test_a_cancel_wakes_the_replica() -> None:
    """The row it frees is used at once, not when the step in flight is over."""

    async def main(loop: VirtualLoop) -> None:
        added_at: dict[int, float] = {}

        class Noting(FakeWorker):
            async def send(self, plan: StepPlan) -> None:
                for sequence in plan.added:
                    added_at[len(sequence.token_ids)] = loop.time()
                await super().send(plan)

        async with running(loop, Noting(Machine(max_sequence_count=1), lambda: 1.0)) as rig:
            first = rig.submit(request("first", [7], 2))
            second = rig.submit(request("second", [8, 9], 2))
            await until(lambda: len(first.tokens) == 1)
            await asyncio.sleep(0.5)
            rig.fleet.finish(RequestId("first"), FinishReason.CANCELLED)
            await rig.settled(first, second)
            assert added_at[2] == pytest.approx(1.5, abs=0.01)

    run_virtual(main)


def test_a_running_name_is_refused_and_the_first_goes_on() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine(), lambda: 0.01)) as rig:
            first = rig.submit(request("a", PROMPT, 10))
            with pytest.raises(DuplicateRequest):
                rig.submit(request("a", PROMPT, 10))
            await rig.settled(first)
            assert first.tokens == expected_tokens(PROMPT, 10)

    run_virtual(main)


def test_a_stop_string_ends_the_request_in_core_and_stream() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.01)
        async with running(loop, worker) as rig:
            answer = rig.submit(request("a", PROMPT, 50), StopAt(7))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPT, 7)
            assert answer.finish is not None
            assert answer.finish.reason is FinishReason.STOP
            assert answer.finish.usage.completion_tokens == 7
            stats = rig.stats()
            assert stats.running == 0
            assert stats.finished[FinishReason.STOP] == 1

    run_virtual(main)


def test_drain_lets_requests_finish_and_refuses_new_ones() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine(), lambda: 0.01)) as rig:
            answer = rig.submit(request("a", PROMPT, 10))
            drain = asyncio.create_task(rig.fleet.drain(60.0))
            await asyncio.sleep(0)
            with pytest.raises(EngineDraining):
                rig.submit(request("b", PROMPT, 3))
            await drain
            assert answer.tokens == expected_tokens(PROMPT, 10)
            assert loop.time() < 10.0, "an idle fleet does not sit out the grace"
            assert rig.readiness[-1] is False

    run_virtual(main)


def test_drain_fails_what_outlives_the_grace() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine(), lambda: 1.0)) as rig:
            answer = rig.submit(request("a", PROMPT, 50))
            await rig.fleet.drain(5.0)
            await rig.settled(answer)
            assert isinstance(answer.error, EngineDraining)
            assert 5.0 <= loop.time() < 7.0

    run_virtual(main)


@pytest.mark.parametrize("where", ["send", "receive"])
def test_a_crash_of_a_replica_ends_every_stream_and_is_raised(where: str) -> None:
    class Broken(FakeWorker):
        async def send(self, plan: StepPlan) -> None:
            if where == "send":
                raise RuntimeError("a bug")
            await super().send(plan)

        async def receive(self) -> StepResult:
            result = await super().receive()
            if where == "receive":
                raise RuntimeError("a bug")
            return result

    async def main(loop: VirtualLoop) -> None:
        rig = Rig(loop, [Broken(Machine())], settings(), 0)
        task = asyncio.create_task(rig.fleet.run())
        await rig.attached()
        async with rig.group:
            answer = rig.submit(request("a", PROMPT, 3))
            await asyncio.wait([task])
        assert isinstance(answer.error, EngineLost)
        assert isinstance(task.exception(), RuntimeError)
        with pytest.raises(EngineDraining):
            rig.fleet.submit(request("b", PROMPT, 3), TokenStream())

    run_virtual(main)


def test_tokens_arrive_step_by_step() -> None:
    """The loop breathes between steps: a client sees tokens long before its request ends."""

    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine())) as rig:
            stream = TokenStream()
            rig.fleet.submit(request("a", PROMPT, 30), stream)
            takes = 0
            finish = None
            while finish is None:
                finish = (await stream.take()).finish
                takes += 1
            assert takes >= 10

    run_virtual(main)


def test_limits_are_the_smallest_of_all() -> None:
    async def main(loop: VirtualLoop) -> None:
        machine = Machine(block_count=9, block_size=4, max_sequence_token_count=64)
        async with running(loop, FakeWorker(machine)) as rig:
            model = rig.fleet.served_model()
            assert model is not None
            assert model.max_sequence_token_count == 32
            answer = rig.submit(request("a", PROMPT, 100))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPT, 27)

    run_virtual(main)


def test_reading_a_failed_stream_raises() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, FakeWorker(Machine(), lambda: 1.0)) as rig:
            answer = rig.submit(request("a", PROMPT, 50))
        assert isinstance(answer.error, EngineLost), "stopping the fleet ends what runs"

    run_virtual(main)
