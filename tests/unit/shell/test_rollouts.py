"""Rollouts over fake workers, in virtual time: what is desired comes about, or all is as before."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from control_plane.core.plan import RowFault, StepPlan, StepResult
from control_plane.core.rollout import Canary, Rollout, RolloutState, Strategy
from control_plane.core.weights import DiskSource, InFlightPolicy, PreparedWeights, WeightsUpdate
from control_plane.shell.engine import EngineLost
from control_plane.shell.ports import RefusalReason, WorkerRefused
from control_plane.shell.rollout_status import Phase
from control_plane.shell.rollout_store import RolloutStore
from control_plane.shell.rollouts import MAX_LINKS, Order, RolloutConflict, Rollouts
from tests.simulation.fake_machine import WEIGHTS, Machine, digest_at
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

START = DiskSource("start")
PROMPTS = [[2 + n, *range(2, 20)] for n in range(8)]


async def inline(save: Callable[[Rollout], None], rollout: Rollout) -> None:
    """In virtual time no thread may take any."""
    save(rollout)
    await asyncio.sleep(0)


class SlowWorker(FakeWorker):
    """Takes time to prepare. `refusals` are raised before, one each time."""

    def __init__(self, **changes: Any) -> None:
        limits = {"block_count": 200, "max_step_token_count": 40, **changes}
        super().__init__(Machine(**limits), lambda: 0.01)
        self.prepare_seconds = 0.2
        self.refusals: list[RefusalReason] = []
        self.updates: list[WeightsUpdate] = []

    async def prepare(self, update: WeightsUpdate) -> PreparedWeights:
        self.updates.append(update)
        if self.refusals:
            raise WorkerRefused(self.refusals.pop(0), "not now")
        return await super().prepare(update)


class UnsoundMachine(Machine):
    """With any other weights than the first, every row faults."""

    def execute(self, plan: StepPlan) -> StepResult:
        result = super().execute(plan)
        if self.digest == WEIGHTS or not result.rows:
            return result
        faults = [RowFault(row, "nan_logits", "NaN") for row in result.rows]
        return StepResult(plan.epoch, plan.step_id, [], [], type(result.tokens)([]), faults=faults)


def made(rig: Rig, store: RolloutStore, source: DiskSource | None = START) -> Rollouts:
    names = count()
    return Rollouts(
        rig.fleet,
        store,
        clock=rig.loop.time,
        new_id=lambda: f"r{next(names)}-{random.random()}",
        first_source=source,
        in_thread=inline,
    )


@asynccontextmanager
async def rolling(
    rig: Rig, store: RolloutStore | None = None, source: DiskSource | None = START
) -> AsyncIterator[Rollouts]:
    """Rollouts over the rig's fleet, while they run."""
    passing = RolloutStore(None)
    rollouts = made(rig, store or passing, source)
    task = asyncio.create_task(rollouts.run())
    try:
        yield rollouts
    finally:
        task.cancel()
        await asyncio.wait([task])
        passing.close()
        assert task.cancelled(), task.exception()


async def over(rollouts: Rollouts) -> Rollout:
    async with asyncio.timeout(300):
        await until(lambda: rollouts.rollout is not None and rollouts.rollout.state.is_over)
    assert rollouts.rollout is not None
    return rollouts.rollout


def digests(rig: Rig) -> list[str]:
    return [worker.machine.digest for worker in rig.workers]


@pytest.mark.parametrize("policy", list(InFlightPolicy))
@pytest.mark.parametrize("strategy", list(Strategy))
def test_all_get_other_weights_under_load(strategy: Strategy, policy: InFlightPolicy) -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [SlowWorker() for _ in range(3)]
        async with running(loop, workers) as rig, rolling(rig) as rollouts:
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], 30)) for n in range(8)]
            await until(lambda: any(answer.tokens for answer in answers))
            seen = []
            await rollouts.begin(Order("v2", DiskSource("v2"), strategy=strategy, policy=policy))
            while (status := rollouts.status).rollout and not status.rollout.state.is_over:
                phases = [replica.phase for replica in status.replicas]
                seen.append(phases)
                if strategy is Strategy.ROLLING:
                    working = (Phase.PREPARING, Phase.EXCHANGING, Phase.PREPARED)
                    assert sum(phase in working for phase in phases) <= 1
                elif Phase.EXCHANGING in phases:
                    assert not {Phase.WAITING, Phase.PREPARING} & set(phases)
                await rollouts.changed(status)
            assert rollouts.rollout is not None
            assert rollouts.rollout.state is RolloutState.DONE
            assert digests(rig) == [digest_at("v2")] * 3
            await rig.settled(*answers)
            if policy is not InFlightPolicy.ABORT:
                assert all(answer.finish is not None for answer in answers)
            if policy is InFlightPolicy.FINISH_ON_OLD:
                assert all(len(answer.finish.spans) == 1 for answer in answers if answer.finish)
            assert rig.fleet.ready
            # Who comes late, or dies, is brought to what is wanted.
            workers[1].kill()
            await until(lambda: not rig.fleet.replicas[1].attached)
            workers[1].reachable = True
            await until(lambda: digests(rig) == [digest_at("v2")] * 3)
            late = SlowWorker()
            late.machine.name = "late"
            rig.fleet.join(late)
            await until(lambda: late.machine.digest == digest_at("v2"))
            after = rig.submit(request("after", PROMPTS[0], 10))
            await rig.settled(after)
            assert after.finish is not None
            assert [span.weights_name for span in after.finish.spans] == ["v2"]

    run_virtual(main)


@pytest.mark.parametrize("count_", [1, 3])
@pytest.mark.parametrize("strategy", list(Strategy))
def test_weights_that_do_not_fit_change_nothing(strategy: Strategy, count_: int) -> None:
    async def main(loop: VirtualLoop) -> None:
        async with (
            running(loop, [SlowWorker() for _ in range(count_)]) as rig,
            rolling(rig) as rollouts,
        ):
            await rollouts.begin(Order("bad", DiskSource("bad"), strategy=strategy))
            ended = await over(rollouts)
            assert ended.state is RolloutState.ROLLED_BACK
            assert "the tensors don't fit" in ended.reason
            await asyncio.sleep(1.0)
            assert digests(rig) == [WEIGHTS] * count_
            assert all(worker.machine.prepared is None for worker in rig.workers)
            assert all(worker.machine.commit_count == 0 for worker in rig.workers)
            # The next one begins as if there had been none.
            await rollouts.begin(Order("v2", DiskSource("v2"), strategy=strategy))
            assert (await over(rollouts)).state is RolloutState.DONE

    run_virtual(main)


def test_refusals_that_pass_are_borne() -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [SlowWorker(), SlowWorker()]
        workers[1].refusals = [RefusalReason.SOURCE_LOST, RefusalReason.WORKER_LOADING]
        async with running(loop, workers) as rig, rolling(rig) as rollouts:
            await rollouts.begin(Order("v2", DiskSource("v2")))
            assert (await over(rollouts)).state is RolloutState.DONE
            workers[0].refusals = [RefusalReason.SOURCE_LOST] * 10
            await rollouts.begin(Order("v3", DiskSource("v3")))
            assert (await over(rollouts)).state is RolloutState.ROLLED_BACK
            assert len(workers[0].refusals) == 6
            assert digests(rig) == [digest_at("v2")] * 2

    run_virtual(main)


@pytest.mark.parametrize("source", [START, None])
def test_weights_that_cannot_answer_are_taken_back(source: DiskSource | None) -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [SlowWorker() for _ in range(3)]
        for worker in workers:
            worker.machine = UnsoundMachine(block_count=200, max_step_token_count=40)
        async with running(loop, workers) as rig, rolling(rig, source=source) as rollouts:
            await rollouts.begin(
                Order("v2", DiskSource("v2"), canary=Canary(percent=10, seconds=60.0))
            )
            await until(lambda: digests(rig).count(WEIGHTS) == 2)
            for number in range(100):
                if rollouts.rollout is not None and rollouts.rollout.state.is_over:
                    break
                answer = rig.submit(request(f"r{number}", PROMPTS[number % 8], 3))
                await rig.settled(answer)
            ended = await over(rollouts)
            assert "could not answer" in ended.reason
            if source is None:
                assert ended.state is RolloutState.FAILED
                assert "nobody knows where" in ended.reason
                assert digests(rig).count(WEIGHTS) == 2
            else:
                assert ended.state is RolloutState.ROLLED_BACK
                assert digests(rig) == [WEIGHTS] * 3

    run_virtual(main)


def test_sound_canaries_are_followed_after_their_time() -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [SlowWorker() for _ in range(4)]
        async with running(loop, workers) as rig, rolling(rig) as rollouts:
            began = loop.time()
            await rollouts.begin(
                Order("v2", DiskSource("v2"), canary=Canary(percent=50, seconds=60.0))
            )
            await asyncio.sleep(30)
            assert digests(rig).count(digest_at("v2")) == 2
            assert (await over(rollouts)).state is RolloutState.DONE
            assert 60 < loop.time() - began < 70
            assert digests(rig) == [digest_at("v2")] * 4

    run_virtual(main)


@pytest.mark.parametrize("strategy", list(Strategy))
@pytest.mark.parametrize("moment", range(0, 100, 7))
def test_a_control_plane_that_ends_goes_on_when_it_is_back(
    tmp_path: Path, strategy: Strategy, moment: int
) -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [SlowWorker(), SlowWorker()]
        async with running(loop, workers) as rig:
            store = RolloutStore(tmp_path / "state")
            async with rolling(rig, store) as rollouts:
                rig.submit(request("r", PROMPTS[0], 30))
                await rollouts.begin(Order("v2", DiskSource("v2"), strategy=strategy))
                await asyncio.sleep(moment / 100)
            store.close()
        # As a start does: what is desired is known before a worker is met.
        store = RolloutStore(tmp_path / "state")
        rig = Rig(loop, workers, settings(), 0)
        rollouts = made(rig, store)
        tasks = [asyncio.create_task(each) for each in (rig.fleet.run(), rollouts.run())]
        assert (await over(rollouts)).state is RolloutState.DONE
        await until(lambda: digests(rig) == [digest_at("v2")] * 2)
        assert len({update.update_id for w in workers for update in w.updates}) == 1
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        store.close()

    run_virtual(main)


@pytest.mark.parametrize("moment", [0, 10, 19, 25, 35])
@pytest.mark.parametrize("strategy", list(Strategy))
def test_an_operator_turns_it_back(strategy: Strategy, moment: int) -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [SlowWorker(), SlowWorker()]
        async with running(loop, workers) as rig, rolling(rig) as rollouts:
            answer = rig.submit(request("r", PROMPTS[0], 40))
            begun = await rollouts.begin(Order("v2", DiskSource("v2"), strategy=strategy))
            await asyncio.sleep(moment / 100)
            with pytest.raises(RolloutConflict):
                await rollouts.begin(Order("v3", DiskSource("v3")))
            with pytest.raises(RolloutConflict):
                await rollouts.abort("another")
            await rollouts.abort(begun.rollout_id)
            assert (await over(rollouts)).state is RolloutState.ROLLED_BACK
            assert digests(rig) == [WEIGHTS] * 2
            assert all(worker.machine.prepared is None for worker in rig.workers)
            await rig.settled(answer)
            assert answer.finish is not None
            for refused in (rollouts.abort, rollouts.rollback):
                with pytest.raises(RolloutConflict):
                    await refused()

    run_virtual(main)


def test_going_back_and_forth() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, [SlowWorker(), SlowWorker()]) as rig, rolling(rig) as rollouts:
            with pytest.raises(RolloutConflict):
                await rollouts.rollback()
            await rollouts.begin(Order("v2", DiskSource("v2")))
            await over(rollouts)
            for path, name in (("start", ""), ("v2", "v2"), ("start", "")):
                back = await rollouts.rollback()
                assert back.target.name == name
                assert (await over(rollouts)).state is RolloutState.DONE
                assert digests(rig) == [digest_at(path)] * 2

    run_virtual(main)


def test_partial_updates_are_gone_through_again() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = SlowWorker()
        async with running(loop, worker) as rig, rolling(rig) as rollouts:
            names: Sequence[str] = [f"p{number}" for number in range(MAX_LINKS + 2)]
            for name in names[:2]:
                await rollouts.begin(Order(name, DiskSource(name), is_partial=True))
                await over(rollouts)
            worker.updates.clear()
            worker.kill()
            worker.reachable = True
            await until(lambda: worker.machine.digest == digest_at("p1"))
            assert [u.source for u in worker.updates] == [DiskSource("p0"), DiskSource("p1")]
            for name in names[2:]:
                await rollouts.begin(Order(name, DiskSource(name), is_partial=True))
                await over(rollouts)
            worker.kill()
            worker.reachable = True
            await until(lambda: rollouts.look().replicas[0].phase is Phase.FAILED)
            assert "nobody knows where" in rollouts.look().replicas[0].trouble

    run_virtual(main)


def test_without_a_worker_nobody_knows_what_serves() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = SlowWorker()
        async with running(loop, worker) as rig, rolling(rig) as rollouts:
            worker.kill()
            await until(lambda: not rig.fleet.replicas[0].attached)
            with pytest.raises(EngineLost):
                await rollouts.begin(Order("v2", DiskSource("v2")))

    run_virtual(main)


@pytest.mark.parametrize("policy", [InFlightPolicy.KEEP_KV, InFlightPolicy.CONTINUE_ON_NEW])
def test_a_paused_fleet_gets_other_weights(policy: InFlightPolicy) -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, [SlowWorker(), SlowWorker()]) as rig, rolling(rig) as rollouts:
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], 30)) for n in range(4)]
            await until(lambda: all(answer.tokens for answer in answers))
            await rig.fleet.weights.pause()
            before = [list(answer.tokens) for answer in answers]
            await rollouts.begin(Order("v2", DiskSource("v2"), policy=policy))
            assert (await over(rollouts)).state is RolloutState.DONE
            await asyncio.sleep(1.0)
            assert [answer.tokens for answer in answers] == before
            rig.fleet.weights.resume()
            await rig.settled(*answers)
            for answer in answers:
                assert answer.finish is not None
                assert [span.weights_name for span in answer.finish.spans] == ["", "v2"]

    run_virtual(main)
