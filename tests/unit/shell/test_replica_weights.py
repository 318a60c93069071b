"""A replica gets other weights while it serves; virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from control_plane.core.events import FinishReason
from control_plane.core.spans import WeightsSpan
from control_plane.core.weights import InFlightPolicy
from control_plane.shell.engine import WeightsChanged
from control_plane.shell.ports import RefusalReason, WorkerLost, WorkerRefused
from tests.simulation.fake_machine import (
    WEIGHTS,
    digest_at,
    expected_tokens,
)
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.replica_weights import (
    ABORT,
    CONTINUE,
    COUNT,
    FINISH,
    KEEP,
    PROMPTS,
    checked,
    exchanged,
    fake,
    nothing_is_held,
    update,
)


@pytest.mark.parametrize("synchronous", [False, True])
@pytest.mark.parametrize("begun", [0, 1, 7])
@pytest.mark.parametrize("policy", list(InFlightPolicy))
def test_what_runs_goes_on_as_the_policy_says(
    policy: InFlightPolicy, begun: int, synchronous: bool
) -> None:
    """Four run and four wait. Nobody who comes later notices."""

    async def main(loop: VirtualLoop) -> None:
        worker = fake()
        async with running(loop, worker, settings(synchronous=synchronous)) as rig:
            [replica] = rig.fleet.replicas
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(8)]
            await until(lambda: len(answers[0].tokens) >= begun)
            before = len(answers[0].tokens)
            rig.fleet.weights.served.serve(
                [WEIGHTS, digest_at("new")], continues=False, names={digest_at("new"): "v2"}
            )
            await exchanged(replica, "new", policy)
            late = rig.submit(request("late", PROMPTS[0], COUNT))
            await rig.settled(late, *answers)
            assert late.tokens == expected_tokens(PROMPTS[0], COUNT, digest=digest_at("new"))
            new = WeightsSpan(COUNT, digest_at("new"), "v2")
            assert late.finish is not None and late.finish.spans == (new,)
            for number, answer in enumerate(answers):
                if number >= 4:
                    assert answer.finish is not None and answer.finish.spans == (new,)
                if policy is ABORT and answer.finish is not None:
                    aborted = answer.finish.reason is FinishReason.WEIGHTS_CHANGED
                    assert aborted == (0 < len(answer.tokens) < COUNT)
                else:
                    checked(rig, number, answer, {WEIGHTS, digest_at("new")})
            first = answers[0].finish
            assert first is not None
            assert len(first.spans) == 1 or policy in (CONTINUE, KEEP)
            assert len(first.spans) > 1 or policy in (ABORT, FINISH) or not before
            is_kept = any(span.kv_of_other_weights for span in first.spans)
            assert (is_kept, begun > 0) in (
                (policy is KEEP, True),
                (is_kept and policy is KEEP, False),
            )
            nothing_is_held(rig)
            assert rig.stats().generated_by_weights["v2"] > 0
            assert b'outcome="done",replica="0"} 1.0' in rig.telemetry.render() or (
                b'replica="0",outcome="done"} 1.0' in rig.telemetry.render()
            )

    run_virtual(main)


def test_cached_blocks_are_of_one_version() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, fake()) as rig:
            [replica] = rig.fleet.replicas
            for path, cached in (("b", 0), ("c", 0), ("start", 0)):
                await exchanged(replica, path, KEEP)
                for cached_now in (cached, 16):
                    answer = rig.submit(request(f"r{loop.time()}", PROMPTS[0], COUNT))
                    await rig.settled(answer)
                    assert answer.finish is not None
                    assert answer.finish.usage.cached_prompt_tokens == cached_now
                    digest = digest_at(path)
                    assert answer.tokens == expected_tokens(PROMPTS[0], COUNT, digest=digest)

    run_virtual(main)


async def lost_before(rig: Rig, worker: FakeWorker) -> None:
    worker.commit_seconds = 1.0
    asyncio.get_running_loop().call_later(0.5, worker.break_connection)


async def lost_after(rig: Rig, worker: FakeWorker) -> None:
    worker.loses_commits = True


async def killed(rig: Rig, worker: FakeWorker) -> None:
    worker.commit_seconds = 1.0
    loop = asyncio.get_running_loop()
    loop.call_later(0.5, worker.kill)
    loop.call_later(0.7, setattr, worker, "reachable", True)


async def silent(rig: Rig, worker: FakeWorker) -> None:
    worker.commit_seconds = 0.5
    asyncio.get_running_loop().call_later(0.2, worker.freeze)
    asyncio.get_running_loop().call_later(8.0, worker.thaw)


@pytest.mark.parametrize("policy", [ABORT, KEEP, CONTINUE])
@pytest.mark.parametrize("lose", [lost_before, lost_after, killed, silent])
def test_a_worker_that_is_lost_in_the_middle_tells_afterwards_what_has_become_of_it(
    lose: Callable[[Rig, FakeWorker], Awaitable[None]], policy: InFlightPolicy
) -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = fake()
        async with running(loop, worker) as rig:
            [replica] = rig.fleet.replicas
            digests = {WEIGHTS, digest_at("new")}
            rig.fleet.weights.served.serve(digests, continues=policy is not ABORT)
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(6)]
            await until(lambda: len(answers[0].tokens) >= 5)
            prepared = await replica.weights.prepare(update("new"))
            await lose(rig, worker)
            with pytest.raises(WorkerLost):
                await replica.weights.switch(prepared.update_id, prepared.digest, policy)
            worker.loses_commits, worker.commit_seconds = False, 0.0
            await until(lambda: replica.attached)
            observed = replica.weights.observed()
            assert observed.version is not None and not observed.is_switching
            if lose is lost_after:
                assert observed.version.digest == prepared.digest and observed.prepared is None
            elif observed.version.digest == WEIGHTS and lose is not killed:
                assert observed.prepared is not None
                assert observed.prepared.digest == prepared.digest
            if observed.version.digest == WEIGHTS:
                if observed.prepared is None:
                    await replica.weights.prepare(update("new"))
                await replica.weights.switch(prepared.update_id, prepared.digest, policy)
            await rig.settled(*answers)
            for number, answer in enumerate(answers):
                if answer.finish is None:
                    assert isinstance(answer.error, WeightsChanged) and policy is ABORT
                elif answer.finish.reason is FinishReason.WEIGHTS_CHANGED:
                    assert policy is ABORT and answer.tokens
                else:
                    checked(rig, number, answer, digests)
            assert worker.machine.commit_count == 1
            nothing_is_held(rig)

    run_virtual(main)


def test_what_is_refused_changes_nothing() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, fake()) as rig:
            [replica] = rig.fleet.replicas
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(8)]
            await until(lambda: len(answers[0].tokens) >= 3)
            with pytest.raises(WorkerRefused) as refused:
                await replica.weights.prepare(update("bad"))
            assert refused.value.reason is RefusalReason.INVALID_UPDATE
            for policy in InFlightPolicy:
                if policy is not FINISH:
                    with pytest.raises(WorkerRefused) as refused:
                        await replica.weights.switch("none", "0" * 64, policy)
                    assert refused.value.reason is RefusalReason.UPDATE_CONFLICT
            with pytest.raises(WorkerRefused):  # and then those that wait go on
                await replica.weights.switch("none", "0" * 64, FINISH)
            await rig.settled(*answers)
            for number, answer in enumerate(answers):
                assert answer.tokens == expected_tokens(PROMPTS[number], COUNT)
            await replica.weights.prepare(update("new"))
            assert replica.weights.observed().prepared is not None
            await replica.weights.abort("update new")
            assert replica.weights.observed().prepared is None
            nothing_is_held(rig)

    run_virtual(main)


def test_one_that_is_called_off_has_never_been() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = fake()
        async with running(loop, worker) as rig:
            [replica] = rig.fleet.replicas
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(8)]
            await until(lambda: len(answers[0].tokens) >= 3)
            prepared = await replica.weights.prepare(update("new"))
            task = asyncio.create_task(
                replica.weights.switch(prepared.update_id, prepared.digest, FINISH)
            )
            await asyncio.sleep(0.05)
            assert replica.weights.observed().is_switching
            with pytest.raises(WorkerRefused, match="about to"):
                await replica.weights.switch(prepared.update_id, prepared.digest, KEEP)
            task.cancel()
            await asyncio.wait([task])
            assert not replica.weights.observed().is_switching
            await rig.settled(*answers)
            for number, answer in enumerate(answers):
                assert answer.tokens == expected_tokens(PROMPTS[number], COUNT)
            assert worker.machine.digest == WEIGHTS
            nothing_is_held(rig)

    run_virtual(main)
