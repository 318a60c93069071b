"""A replica of several simulated ranks over real loopback gRPC: as good as one worker."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from control_plane.core.claim import ClaimPolicy
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.ports import WorkerLost, WorkerRefused, WorkerUnusable
from control_plane.shell.rank_group import RankGroupWorker
from control_plane.shell.ranks import Rendezvous
from tests.simulation.test_loopback import PROMPTS, alone, driven, generate
from tests.support.quick import spread
from tests.support.rank_rig import MODEL, Ranks, RankServer, place, ranks
from tests.support.wire import Wire
from worker_service.domain.plan import StepPlan, StepResult
from worker_service.runner.interface import CompletedStep, PendingStep
from worker_service.simulated.runner import SimulatedLatency, SimulatedRunner

SLOW = SimulatedLatency(step=0.004)
SECONDS = 60.0
SOON = ClaimPolicy(contention_delay=0.02, longest_contention_delay=0.1)


def generated(fleet: Fleet) -> int:
    stats = fleet.replicas[0].stats()
    return 0 if stats is None else stats.generated_tokens


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def assert_nothing_is_held(fleet: Fleet) -> None:
    stats = fleet.replicas[0].stats()
    assert stats is not None
    assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2), (2, 2), (3, 1)])
async def test_tokens_are_those_of_one_worker(tensor: int, pipeline: int) -> None:
    async with (
        ranks(tensor, pipeline) as replica,
        driven(replica.worker(), SchedulingSettings()) as fleet,
    ):
        for _ in range(2):  # cold, then with the prefix cache warm
            assert await generate(fleet, list(PROMPTS)) == await alone()
        epochs = {server.facade.worker_info().epoch for server in replica.servers}
        assert epochs == {1}
        assert_nothing_is_held(fleet)


@pytest.mark.parametrize("seed", spread(range(10), 3))
async def test_any_rank_killed_at_any_moment_loses_nothing(seed: int) -> None:
    """Killed in the middle of a step, or while the replica is claimed again; twice in a run."""
    rng = random.Random(seed)
    expected = await alone()
    sizes = rng.choice([(2, 1), (1, 2), (2, 2)])
    async with (
        ranks(*sizes, latency=SLOW) as replica,
        driven(replica.worker(), SchedulingSettings()) as fleet,
    ):
        task = asyncio.create_task(generate(fleet, list(PROMPTS)))
        for least in (rng.randrange(60), rng.randrange(70, 130)):
            await until(lambda least=least: generated(fleet) >= least)
            await asyncio.sleep(rng.random() * 0.01)
            victim = rng.choice(replica.servers)
            await victim.kill()
            await asyncio.sleep(rng.random() * 0.1)
            await victim.start()
        assert await asyncio.wait_for(task, SECONDS) == expected
        assert_nothing_is_held(fleet)


class Drifting(SimulatedRunner):
    """Applies something else in one step."""

    drifts_at = 6
    drifted = False

    def launch(self, plan: StepPlan) -> PendingStep:
        result: StepResult = super().launch(plan).result()
        if plan.step_id == self.drifts_at and not Drifting.drifted:
            Drifting.drifted = True
            result = replace(result, digest=result.digest[::-1])
        return CompletedStep(result)


@pytest.mark.parametrize("which", range(4))
async def test_ranks_that_drift_apart_are_claimed_again(
    which: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Drifting, "drifted", False)
    servers = [
        RankServer(place(index, 2, 2), kind=Drifting if index == which else SimulatedRunner)
        for index in range(4)
    ]
    async with (
        Ranks(servers) as replica,
        driven(replica.worker(), SchedulingSettings()) as fleet,
    ):
        assert await generate(fleet, list(PROMPTS)) == await alone()
        assert Drifting.drifted
        assert {server.facade.worker_info().epoch for server in replica.servers} == {2}
        assert any("has applied something else" in str(vars(one)) for one in caplog.records)
        assert_nothing_is_held(fleet)


async def test_a_rival_of_one_rank_alone_is_overtaken() -> None:
    """Its claim ends ours; the next is above every epoch, of whichever rank."""
    expected = await alone()
    async with (
        ranks(2, 1, latency=SLOW) as replica,
        driven(replica.worker(), SchedulingSettings(), SOON) as fleet,
    ):
        task = asyncio.create_task(generate(fleet, list(PROMPTS)))
        await until(lambda: generated(fleet) >= 20)
        rival = GrpcWorker(replica.servers[1].address, controller_id="rival")
        await rival.claim(9, Rendezvous("127.0.0.1:1", "rival", 2, 1, 1.0))
        await rival.detach()
        assert await asyncio.wait_for(task, SECONDS) == expected
        epochs = {server.facade.worker_info().epoch for server in replica.servers}
        assert epochs == {10}


async def test_a_reset_connection_of_one_rank_keeps_the_kv_of_all() -> None:
    expected = await alone()
    async with (
        ranks(2, 1, latency=SLOW) as replica,
        Wire(replica.servers[1].port) as wire,
    ):
        addresses = (replica.servers[0].address, f"127.0.0.1:{wire.port}")
        worker = RankGroupWorker(
            [GrpcWorker(address, controller_id="test") for address in addresses],
            new_key=iter("abcdefgh").__next__,
        )
        async with driven(worker, SchedulingSettings()) as fleet:
            task = asyncio.create_task(generate(fleet, list(PROMPTS)))
            await until(lambda: generated(fleet) >= 40)
            wire.reset()
            assert await asyncio.wait_for(task, SECONDS) == expected
            assert {server.facade.worker_info().epoch for server in replica.servers} == {2}
            stats = fleet.replicas[0].stats()
            assert stats is not None and stats.recomputed_tokens <= 4 * (8 + 1) + 2 * 32


async def test_a_rank_that_is_not_there_yet_is_waited_for() -> None:
    replica = ranks(2, 2)
    async with replica:
        missing = replica.servers[3]
        await missing.kill()
        worker = replica.worker()
        with pytest.raises(WorkerLost, match=missing.address):
            await worker.attach()
        await worker.detach()
        driving = driven(replica.worker(), SchedulingSettings())
        entering = asyncio.create_task(driving.__aenter__())
        await asyncio.sleep(0.05)
        assert not entering.done()
        await missing.start()
        fleet = await asyncio.wait_for(entering, SECONDS)
        try:
            assert await generate(fleet, ["r0", "r3"]) == {
                name: tokens for name, tokens in (await alone()).items() if name in ("r0", "r3")
            }
        finally:
            await driving.__aexit__(None, None, None)


async def test_a_rank_is_not_driven_alone() -> None:
    async with ranks(2, 1) as replica:
        worker = GrpcWorker(replica.servers[0].address, controller_id="test")
        with pytest.raises(WorkerUnusable, match="is one of 2 ranks, which must execute each plan"):
            await worker.attach()
        await worker.detach()


@pytest.mark.parametrize(
    ("places", "why"),
    [
        ([(0, 2, 1), (0, 2, 1)], "are both tensor rank 0"),
        ([(0, 2, 2), (1, 2, 2), (3, 2, 2)], "nobody is tensor rank 0, pipeline rank 1"),
        ([(0, 1, 1), (1, 2, 1)], "executes plans alone"),
        ([(0, 2, 1), (1, 1, 2)], "different parallel sizes"),
    ],
)
async def test_workers_that_are_no_replica(places: list[tuple[int, int, int]], why: str) -> None:
    async with Ranks([RankServer(place(*each)) for each in places]) as replica:
        worker = replica.worker()
        with pytest.raises(WorkerUnusable, match=why) as raised:
            await worker.attach()
        assert any(server.address in str(raised.value) for server in replica.servers)
        await worker.detach()
        assert {server.facade.worker_info().epoch for server in replica.servers} == {0}


async def test_together_they_do_the_least_of_each() -> None:
    servers = [RankServer(place(index, 2, 1)) for index in range(2)]
    small = replace(MODEL.limits, max_sequence_count=2, max_sequence_token_count=64)
    servers[1].model = replace(MODEL, block_count=40, limits=small)
    async with Ranks(servers) as replica:
        worker = replica.worker()
        attachment = await worker.attach()
        assert attachment.pool.block_count == 40
        assert attachment.info.max_sequence_count == 2
        assert attachment.info.max_sequence_token_count == 64
        await worker.detach()


async def test_two_controllers_over_the_ranks_both_go_on() -> None:
    """They take the replica from each other, never a part of it, and each one's work ends."""
    expected = await alone()
    async with ranks(2, 2, latency=SimulatedLatency(step=0.001)) as replica:

        async def work(who: str) -> dict[str, list[int]]:
            async with driven(replica.worker(who), SchedulingSettings(), SOON) as fleet:
                return await generate(fleet, list(PROMPTS))

        async with asyncio.timeout(SECONDS):
            assert await asyncio.gather(work("a"), work("b")) == [expected, expected]
        assert len({server.facade.worker_info().epoch for server in replica.servers}) == 1


@pytest.mark.parametrize("seed", spread(range(20), 5))
async def test_attempts_of_two_controllers_never_split_the_ranks(seed: int) -> None:
    rng = random.Random(seed)
    async with ranks(2, 1) as replica:

        async def attempt(who: str) -> bool:
            worker = replica.worker(who)
            await asyncio.sleep(rng.random() * 0.004)
            try:
                await worker.attach()
            except (WorkerRefused, WorkerLost):
                return False
            finally:
                await worker.detach()
            return True

        outcomes = await asyncio.gather(*(attempt(who) for who in "abc"))
        assert any(outcomes)
        assert len({server.facade.worker_info().epoch for server in replica.servers}) == 1
