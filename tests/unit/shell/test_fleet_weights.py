"""A fleet whose replicas get other weights: who may answer, who waits, and pauses; virtual time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from control_plane.core.events import FinishReason
from control_plane.core.request import Origin, Resumed
from control_plane.core.spans import WeightsSpan
from control_plane.core.weights import InFlightPolicy
from control_plane.shell.engine import CannotResume, EngineLost, EnginePaused
from control_plane.shell.ports import WorkerLost
from tests.simulation.fake_machine import (
    WEIGHTS,
    digest_at,
    expected_tokens,
)
from tests.simulation.rig import request, running, until
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
