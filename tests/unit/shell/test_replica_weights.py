"""A replica gets other weights while it serves; virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from control_plane.core.events import FinishReason
from control_plane.core.request import Origin, Resumed
from control_plane.core.spans import WeightsSpan
from control_plane.core.weights import DiskSource, InFlightPolicy, PreparedWeights, WeightsUpdate
from control_plane.shell.engine import CannotResume, EngineLost, EnginePaused, WeightsChanged
from control_plane.shell.ports import RefusalReason, WorkerLost, WorkerRefused
from control_plane.shell.replica import Replica
from tests.simulation.fake_worker import (
    WEIGHTS,
    FakeWorker,
    Machine,
    digest_at,
    expected_over,
    expected_tokens,
)
from tests.simulation.rig import Answer, Rig, request, running, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

ABORT, KEEP, CONTINUE, FINISH = (
    InFlightPolicy.ABORT,
    InFlightPolicy.KEEP_KV,
    InFlightPolicy.CONTINUE_ON_NEW,
    InFlightPolicy.FINISH_ON_OLD,
)
COUNT = 20
PROMPTS = [[2 + n, *range(2, 20)] for n in range(8)]


def fake(**changes: int) -> FakeWorker:
    limits = {"block_count": 200, "max_step_token_count": 40, **changes}
    return FakeWorker(Machine(**limits), lambda: 0.01)  # type: ignore[arg-type]


def update(path: str) -> WeightsUpdate:
    return WeightsUpdate(f"update {path}", DiskSource(path))


async def exchanged(replica: Replica, path: str, policy: InFlightPolicy) -> PreparedWeights:
    prepared = await replica.weights.prepare(update(path))
    version = await replica.weights.switch(prepared.update_id, prepared.digest, policy)
    assert version.digest == prepared.digest == digest_at(path)
    return prepared


def checked(rig: Rig, number: int, answer: Answer, digests: set[str], done: int = 0) -> None:
    """Its tokens are those of its spans, and these have only such weights."""
    assert answer.finish is not None, answer.error
    spans = answer.finish.spans
    assert sum(span.token_count for span in spans) == len(answer.tokens) == COUNT
    assert {span.weights_digest for span in spans} <= digests
    assert answer.tokens == expected_over(PROMPTS[number], spans)


def nothing_is_held(rig: Rig) -> None:
    for number in range(len(rig.workers)):
        stats = rig.stats(number)
        assert not (stats.running or stats.waiting or stats.kv_active_tokens)


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


def test_while_one_finishes_others_take_who_waits_there() -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [fake(), fake()]
        async with running(loop, workers) as rig:
            first, _ = rig.fleet.replicas
            served = rig.fleet.weights.served
            served.serve([WEIGHTS, digest_at("new")], continues=False)
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(8)]
            await until(lambda: all(len(answer.tokens) >= 3 for answer in answers))
            switching = asyncio.create_task(exchanged(first, "new", FINISH))
            await asyncio.sleep(0.02)
            more = [rig.submit(request(f"m{n}", PROMPTS[n], COUNT)) for n in range(4)]
            await switching
            await rig.settled(*answers, *more)
            for number, answer in enumerate(answers):
                assert answer.tokens == expected_tokens(PROMPTS[number], COUNT), "on the old ones"
            for number, answer in enumerate(more):
                checked(rig, number, answer, {WEIGHTS, digest_at("new")})
                assert answer.finish is not None and len(answer.finish.spans) == 1
            nothing_is_held(rig)

    run_virtual(main)


@pytest.mark.parametrize("continues", [False, True])
def test_from_a_lost_worker_to_one_with_other_weights(continues: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [fake(), fake()]
        async with running(loop, workers) as rig:
            first, second = rig.fleet.replicas
            digests = [WEIGHTS, digest_at("new")]
            rig.fleet.weights.served.serve(digests, continues=continues)
            await exchanged(second, "new", KEEP)
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(4)]
            await until(lambda: all(len(answer.tokens) >= 3 for answer in answers))
            there = [a for n, a in enumerate(answers) if rig.core(0).ledger.sequences.get(n + 1)]  # type: ignore[call-overload]
            assert there
            workers[0].kill()
            if continues:
                await rig.settled(*answers)
                for number, answer in enumerate(answers):
                    checked(rig, number, answer, set(digests))
                    assert answer.finish is not None
                    assert len(answer.finish.spans) == 1 + (answer in there)
            else:
                await asyncio.sleep(2.0)
                assert not any(answer.end_count for answer in there), "they wait for their own"
                workers[0].reachable = True
                await rig.settled(*answers)
                for number, answer in enumerate(answers):
                    checked(rig, number, answer, set(digests))
            assert first.number != second.number

    run_virtual(main)


@pytest.mark.parametrize("continues", [False, True])
def test_a_worker_with_weights_that_are_not_to_answer_waits_for_others(continues: bool) -> None:
    """It has died after an exchange, and comes back with what it started with."""

    async def main(loop: VirtualLoop) -> None:
        worker = fake()
        async with running(loop, worker) as rig:
            [replica] = rig.fleet.replicas
            served = rig.fleet.weights.served
            served.serve([WEIGHTS, digest_at("new")], continues=continues)
            await exchanged(replica, "new", CONTINUE)
            served.serve([digest_at("new")], continues=continues)
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(8)]
            await until(lambda: len(answers[0].tokens) >= 5)
            worker.machine.restart()
            worker.break_connection()
            await until(lambda: replica.attached and worker.machine.epoch == 2)
            assert replica.weights.observed().is_waiting and not rig.fleet.ready
            with pytest.raises(EngineLost):
                rig.submit(request("refused", PROMPTS[0], COUNT))
            await asyncio.sleep(1.0)
            assert not any(answer.end_count for answer in answers)
            # Whoever began with these very weights goes on with them, as after any loss.
            await exchanged(replica, "new", CONTINUE)
            await rig.settled(*answers)
            for number, answer in enumerate(answers):
                checked(rig, number, answer, {digest_at("new")})
            assert rig.fleet.ready
            nothing_is_held(rig)

    run_virtual(main)


@pytest.mark.parametrize("continues", [False, True])
def test_weights_that_may_answer_after_all_do(continues: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = fake()
        async with running(loop, worker) as rig:
            [replica] = rig.fleet.replicas
            served = rig.fleet.weights.served
            served.serve([WEIGHTS], continues=continues)
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(8)]
            await until(lambda: len(answers[0].tokens) >= 5)
            worker.machine.restart()
            worker.machine.digest = other = "b" * 64
            worker.break_connection()
            await until(lambda: replica.attached and worker.machine.epoch == 2)
            await asyncio.sleep(1.0)
            assert not any(answer.end_count for answer in answers)
            served.serve([other], continues=continues)
            await rig.settled(*answers)
            for number, answer in enumerate(answers):
                assert answer.finish is not None
                if not continues and number < 4:
                    assert answer.finish.reason is FinishReason.WEIGHTS_CHANGED
                else:
                    checked(rig, number, answer, {WEIGHTS, other})
            nothing_is_held(rig)

    run_virtual(main)


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("policy", list(InFlightPolicy))
def test_a_fleet_pauses_and_goes_on(policy: InFlightPolicy, refuses: bool) -> None:
    async def main(loop: VirtualLoop) -> None:
        workers = [fake(), fake()]
        async with running(loop, workers) as rig:
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(8)]
            await until(lambda: all(len(answer.tokens) >= 5 for answer in answers))
            await rig.fleet.weights.pause(policy, refuses=refuses)
            assert all(r.weights.observed().is_paused for r in rig.fleet.replicas)
            await asyncio.sleep(0.1)
            plans = [len(worker.machine.executed_plans) for worker in workers]
            if refuses:
                with pytest.raises(EnginePaused):
                    rig.submit(request("late", PROMPTS[0], COUNT))
                with pytest.raises(EnginePaused):
                    rig.fleet.check_room()
                late = None
            else:
                late = rig.submit(request("late", PROMPTS[0], COUNT))
            await asyncio.sleep(5.0)
            assert plans == [len(worker.machine.executed_plans) for worker in workers]
            stats = [rig.stats(number) for number in range(2)]
            assert not any(one.inflight for one in stats)
            assert any(one.kv_active_tokens for one in stats) == (policy is KEEP)
            workers[0].break_connection()
            await asyncio.sleep(1.0)
            assert plans == [len(worker.machine.executed_plans) for worker in workers]
            rig.fleet.weights.resume()
            if refuses:
                late = rig.submit(request("late", PROMPTS[0], COUNT))
            assert late is not None
            await rig.settled(late, *answers)
            for number, answer in enumerate(answers):
                assert answer.finish is not None
                aborted = answer.finish.reason is FinishReason.WEIGHTS_CHANGED
                assert aborted == (policy is ABORT)
                if not aborted:
                    assert answer.tokens == expected_tokens(PROMPTS[number], COUNT)
                    assert answer.finish.spans == (WeightsSpan(COUNT, WEIGHTS),)
            assert late.tokens == expected_tokens(PROMPTS[0], COUNT)
            nothing_is_held(rig)

    run_virtual(main)


def test_a_pause_that_waits_is_called_off_by_whoever_goes_on() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, [fake(), fake()]) as rig:
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(8)]
            await until(lambda: all(len(answer.tokens) >= 2 for answer in answers))
            pausing = asyncio.create_task(rig.fleet.weights.pause(FINISH))
            await asyncio.sleep(0.05)
            late = rig.submit(request("late", PROMPTS[0], COUNT))
            assert not pausing.done()
            rig.fleet.weights.resume()
            await pausing
            await rig.settled(late, *answers)
            assert not any(r.weights.observed().is_paused for r in rig.fleet.replicas)
            assert late.tokens == expected_tokens(PROMPTS[0], COUNT)
            nothing_is_held(rig)

    run_virtual(main)


@pytest.mark.parametrize("policy", [CONTINUE, KEEP, ABORT])
def test_weights_are_exchanged_while_all_is_paused(policy: InFlightPolicy) -> None:
    """As trainers do it: pause, update, go on."""

    async def main(loop: VirtualLoop) -> None:
        async with running(loop, [fake(), fake()]) as rig:
            digests = {WEIGHTS, digest_at("new")}
            rig.fleet.weights.served.serve(digests, continues=policy is not ABORT)
            answers = [rig.submit(request(f"r{n}", PROMPTS[n], COUNT)) for n in range(8)]
            await until(lambda: all(len(answer.tokens) >= 5 for answer in answers))
            await rig.fleet.weights.pause()
            for replica in rig.fleet.replicas:
                await exchanged(replica, "new", policy)
            await asyncio.sleep(1.0)
            assert not any(rig.stats(number).inflight for number in range(2))
            rig.fleet.weights.resume()
            await rig.settled(*answers)
            for number, answer in enumerate(answers):
                assert answer.finish is not None
                if policy is ABORT:
                    assert answer.finish.reason is FinishReason.WEIGHTS_CHANGED
                else:
                    checked(rig, number, answer, digests)
                    assert len(answer.finish.spans) == 2
            nothing_is_held(rig)

    run_virtual(main)


def test_a_worker_that_never_commits_is_lost() -> None:
    async def main(loop: VirtualLoop) -> None:
        worker = fake()
        async with running(loop, worker) as rig:
            [replica] = rig.fleet.replicas
            answer = rig.submit(request("r", PROMPTS[0], COUNT))
            await until(lambda: len(answer.tokens) >= 5)
            prepared = await replica.weights.prepare(update("new"))
            worker.commit_seconds = 1e6
            with pytest.raises(WorkerLost, match="60 s"):
                await replica.weights.switch(prepared.update_id, prepared.digest, KEEP)
            await rig.settled(answer)
            assert answer.tokens == expected_tokens(PROMPTS[0], COUNT)
            nothing_is_held(rig)

    run_virtual(main)


@pytest.mark.parametrize("continues", [False, True])
@pytest.mark.parametrize("digest", [WEIGHTS, digest_at("new"), "c" * 64])
def test_tokens_of_other_weights_are_resumed_where_the_policy_lets_them(
    continues: bool, digest: str
) -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, fake()) as rig:
            [replica] = rig.fleet.replicas
            rig.fleet.weights.served.serve([WEIGHTS, digest_at("new")], continues=continues)
            await exchanged(replica, "new", CONTINUE)
            begun = expected_tokens(PROMPTS[0], 5, digest=digest)
            origin = Origin(digest, "", weights_name="n", kv_of_other_weights=True)
            resumed = Resumed(begun, origin)
            asked = replace(request("r", PROMPTS[0], COUNT), resumed=resumed)
            if not continues and digest != digest_at("new"):
                with pytest.raises(CannotResume, match="weights"):
                    rig.submit(asked)
                return
            answer = rig.submit(asked)
            await rig.settled(answer)
            assert answer.finish is not None
            spans = answer.finish.spans
            new = WeightsSpan(COUNT - 5, digest_at("new"))
            assert spans == (WeightsSpan(5, digest, "n", kv_of_other_weights=True), new)
            right = expected_tokens([*PROMPTS[0], *begun], COUNT - 5, digest=digest_at("new"))
            assert answer.tokens == right
            nothing_is_held(rig)

    run_virtual(main)


def test_names_are_told_with_the_model() -> None:
    async def main(loop: VirtualLoop) -> None:
        async with running(loop, fake()) as rig:
            [replica] = rig.fleet.replicas
            digest = digest_at("new")
            rig.fleet.weights.served.serve([WEIGHTS, digest], continues=True, names={digest: "v2"})
            await exchanged(replica, "new", CONTINUE)
            model = rig.fleet.served_model()
            assert model is not None and model.weight_version.name == "v2"
            assert model.weight_version.digest == digest and model.weight_version.generation == 2
            assert replace(model.weight_version, name="") == model.weight_version

    run_virtual(main)
