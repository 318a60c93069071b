"""A replica when its worker is lost, refuses, changes or is claimed by another; virtual time."""

from __future__ import annotations

import asyncio
import logging

import pytest

from control_plane.core.events import FinishReason
from control_plane.core.plan import StepPlan, StepResult
from control_plane.core.request import RequestId
from control_plane.shell.engine import EngineLost
from control_plane.shell.ports import (
    Admit,
    Attachment,
    RefusalReason,
    WorkerLost,
    WorkerRefused,
)
from control_plane.shell.stream import TokenStream
from control_plane.shell.workers import away_seconds
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_lost_worker_is_only_a_pause(restarts: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.01)
        async with running(loop, worker) as rig:
            answers = [rig.submit(request(f"r{n}", [*PROMPT, n], 30)) for n in range(3)]
            await until(lambda: len(answers[0].tokens) >= 10)
            worker.reachable = False
            worker.break_connection()
            if restarts:
                worker.machine.restart()
            await asyncio.sleep(3.0)
            assert not rig.fleet.ready
            assert rig.fleet.served_model() is not None, "a short loss is only a pause"
            late = rig.submit(request("late", PROMPT, 5, arrival=loop.time()))
            worker.reachable = True
            await rig.settled(*answers, late)
            for n, answer in enumerate(answers):
                assert answer.tokens == expected_tokens([*PROMPT, n], 30)
            assert late.tokens == expected_tokens(PROMPT, 5)
            assert rig.readiness == [True, False, True]
            kv = "discarded" if restarts else "kept"
            resyncs = f'twinplane_worker_resyncs_total{{kv="{kv}",replica="0"}} 1.0'
            assert resyncs in rig.telemetry.render().decode()

    run_virtual(main)


def test_an_idle_worker_that_vanishes_is_noticed() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine())
        async with running(loop, worker) as rig:
            worker.break_connection()
            await asyncio.sleep(1.0)
            assert rig.readiness == [True, False, True]

    run_virtual(main)


def test_a_refused_plan_resyncs() -> None:
    """The worker's rows vanish behind the replica's back: PLAN_MISMATCH, and on it goes."""

    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.01)
        async with running(loop, worker) as rig:
            answer = rig.submit(request("a", PROMPT, 30))
            await until(lambda: len(answer.tokens) >= 10)
            for row in worker.machine.rows.values():
                row.computed += 1
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPT, 30)
            assert worker.attach_count == 2

    run_virtual(main)


def test_another_claim_is_not_fought_over() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.01)
        async with running(loop, worker, settings(contention_delay=20.0)) as rig:
            answer = rig.submit(request("a", PROMPT, 30))
            await until(lambda: len(answer.tokens) >= 5)
            worker.machine.claim(worker.machine.epoch + 5)
            claimed_at = loop.time()
            await until(lambda: worker.attach_count > 1)
            assert loop.time() - claimed_at >= 10.0
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPT, 30)
            assert worker.machine.epoch == 7, "one above the other claim"

    run_virtual(main)


def test_other_weights_end_what_is_mid_stream_and_run_what_has_not_begun() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(max_sequence_count=1), lambda: 0.01)
        async with running(loop, worker) as rig:
            begun = rig.submit(request("begun", PROMPT, 30))
            queued = rig.submit(request("queued", PROMPT, 5))
            await until(lambda: len(begun.tokens) >= 5)
            worker.machine.restart()
            worker.machine.digest = "b" * 64
            worker.break_connection()
            await rig.settled(begun, queued)
            assert isinstance(begun.error, EngineLost)
            assert 5 <= len(begun.tokens) < 30
            assert queued.tokens == expected_tokens(PROMPT, 5, digest="b" * 64)
            model = rig.fleet.served_model()
            assert model is not None and model.weight_version.digest == "b" * 64

    run_virtual(main)


def test_a_long_loss_fails_requests_and_refuses_new_ones() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.01)
        async with running(loop, worker, settings(loss_patience=30.0)) as rig:
            assert away_seconds(rig.serving()) == 0.0
            answer = rig.submit(request("a", PROMPT, 30))
            worker.reachable = False
            worker.break_connection()
            await rig.settled(answer)
            assert isinstance(answer.error, EngineLost)
            assert 30.0 <= loop.time() < 31.0
            assert rig.fleet.served_model() is None
            assert 30.0 <= away_seconds(rig.serving()) < 31.0
            await asyncio.sleep(3600.0)
            assert 3630.0 <= away_seconds(rig.serving()) < 3631.0
            with pytest.raises(EngineLost):
                rig.submit(request("b", PROMPT, 3))
            worker.reachable = True
            await rig.attached()
            assert away_seconds(rig.serving()) == 0.0
            after = rig.submit(request("c", PROMPT, 3, arrival=loop.time()))
            await rig.settled(after)
            assert after.tokens == expected_tokens(PROMPT, 3)

    run_virtual(main)


def test_patience_ends_while_the_replica_keeps_away_from_a_rival() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.01)
        chosen = settings(loss_patience=5.0, contention_delay=100.0)
        async with running(loop, worker, chosen) as rig:
            answer = rig.submit(request("a", PROMPT, 30))
            await until(lambda: len(answer.tokens) >= 5)
            worker.machine.claim(worker.machine.epoch + 1)
            await rig.settled(answer)
            assert isinstance(answer.error, EngineLost)
            assert 5.0 <= loop.time() < 6.0

    run_virtual(main)


def test_a_worker_that_can_not_be_used_is_refused_and_tried_again() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(max_sequence_token_count=1))
        rig = Rig(loop, [worker], settings(), 0)
        task = asyncio.create_task(rig.fleet.run())
        await asyncio.sleep(5.0)
        assert not rig.fleet.ready
        worker.machine.max_sequence_token_count = 64
        await rig.attached()
        task.cancel()
        await asyncio.wait([task])

    run_virtual(main)


def test_a_request_that_kills_every_worker_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    """The log tells its story, with no token in it."""

    class Poisoned(FakeWorker):
        async def receive(self) -> StepResult:
            await self._plans.get()
            self.break_connection()
            return await super().receive()

    async def main(loop: VirtualLoop) -> None:
        worker = Poisoned(Machine())
        async with running(loop, worker) as rig:
            answer = rig.submit(request("poison", PROMPT, 3))
            await rig.settled(answer)
            assert answer.finish is not None and answer.finish.reason is FinishReason.FAULT
            assert worker.attach_count == 5

    run_virtual(main)
    (record,) = [r for r in caplog.records if r.getMessage().startswith("request ended")]
    story = record.fields["story"]  # type: ignore[attr-defined]
    assert story.startswith("sequence 1, step 0: submitted; sequence 1, step 0: started in row 0")
    assert story.count("lost its worker") == 4


class Starting(FakeWorker):
    """Not there for three seconds, then loading for four. `tries` has the time of each claim."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__(Machine())
        self._loop = loop
        self.tries: list[float] = []

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        now = self._loop.time()
        self.tries.append(now)
        if now < 3.0:
            raise WorkerLost("no such socket")
        if now < 7.05:
            raise WorkerRefused(RefusalReason.WORKER_LOADING, f"{now} s of loading")
        return await super().attach(epoch, admit)


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said for want of a worker."""
    said = ("no worker", "the worker loads its model")
    records = [record for record in caplog.records if record.getMessage() in said]
    return [str(record.__dict__["fields"]["error"]) for record in records]


def test_a_worker_that_starts_is_claimed_at_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main(loop: VirtualLoop) -> None:
        worker = Starting(loop)
        async with running(loop, worker):
            assert 7.05 <= loop.time() < 7.2
            assert len(worker.tries) <= 75
        assert len(told(caplog)) == 2, "once for each reason, not for each try"
        [loading] = [one for one in caplog.records if "loads its model" in one.getMessage()]
        assert loading.levelno == logging.INFO

    run_virtual(main)


def test_a_worker_that_was_lost_is_asked_less_and_less(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    async def main(loop: VirtualLoop) -> None:
        worker = Starting(loop)
        async with running(loop, worker) as rig:
            for _ in range(2):
                worker.tries.clear()
                caplog.clear()
                worker.reachable = False
                worker.break_connection()
                await asyncio.sleep(60.0)
                assert 30 <= len(worker.tries) < 70, "two seconds apart in the end"
                assert told(caplog) == ["connection broken", "unreachable"]
                worker.reachable = True
                await rig.attached()
                await rig.settled(rig.submit(request("a", PROMPT, 3)))

    run_virtual(main)


def test_before_the_first_claim_nothing_is_accepted() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine())
        worker.reachable = False
        rig = Rig(loop, [worker], settings(), 0)
        task = asyncio.create_task(rig.fleet.run())
        await asyncio.sleep(1.0)
        assert rig.fleet.served_model() is None
        with pytest.raises(EngineLost):
            rig.fleet.submit(request("a", PROMPT, 3), TokenStream())
        assert not rig.fleet.finish(RequestId("a"), FinishReason.CANCELLED)
        worker.reachable = True
        await rig.attached()
        task.cancel()
        await asyncio.wait([task])
        assert rig.readiness == [True, False]

    run_virtual(main)


def test_a_result_of_the_lost_claim_is_not_taken_for_the_new_one() -> None:
    class Breaking(FakeWorker):
        broken = False

        async def send(self, plan: StepPlan) -> None:
            if not self.broken and plan.step_id == 2:
                self.broken = True
                await asyncio.sleep(1.0)  # the first result arrives meanwhile
                self.break_connection()
            await super().send(plan)

    async def main(loop: VirtualLoop) -> None:
        worker = Breaking(Machine())
        async with running(loop, worker) as rig:
            answer = rig.submit(request("a", PROMPT, 10))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPT, 10)
            assert worker.attach_count == 2

    run_virtual(main)


def test_cancel_while_the_worker_is_gone() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = FakeWorker(Machine(), lambda: 0.01)
        async with running(loop, worker) as rig:
            answer = rig.submit(request("a", PROMPT, 50))
            await asyncio.sleep(0.05)
            worker.reachable = False
            worker.break_connection()
            await asyncio.sleep(0.5)
            rig.fleet.finish(RequestId("a"), FinishReason.CANCELLED)
            await rig.settled(answer)
            assert answer.finish is not None
            worker.reachable = True
            await rig.attached()
            stats = rig.stats()
            assert stats.running == stats.waiting == 0

    run_virtual(main)


def test_a_result_of_another_step_resyncs() -> None:
    class Confused(FakeWorker):
        confused = True

        async def receive(self) -> StepResult:
            result = await super().receive()
            if self.confused and result.step_id == 4:
                self.confused = False
                return StepResult(result.epoch, 9, result.rows, result.token_counts, result.tokens)
            return result

    async def main(loop: VirtualLoop) -> None:
        worker = Confused(Machine(), lambda: 0.01)
        async with running(loop, worker) as rig:
            answer = rig.submit(request("a", PROMPT, 20))
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPT, 20)
            assert worker.attach_count == 2

    run_virtual(main)
