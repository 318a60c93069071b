"""Requests that bring the worker down, at random points and in random company: each ends alone."""

from __future__ import annotations

import asyncio
import random

import pytest

from control_plane.core import invariants
from control_plane.core.claim import ClaimPolicy
from control_plane.core.events import FinishReason
from control_plane.core.request import Request
from control_plane.shell.engine import EngineLost
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from tests.simulation.fake_machine import VOCABULARY, Machine, expected_tokens
from tests.simulation.poison import Effect, PoisonedWorker
from tests.simulation.rig import Answer, Rig, request, running, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread

LONGEST = 64
MAX_CLAIMS = 5
every_effect = pytest.mark.parametrize("effect", Effect)


def draw_requests(rng: random.Random, count: int) -> list[Request]:
    """Some share a prefix, some have prompts longer than a step; the seed names each."""
    shared = [rng.randrange(2, VOCABULARY) for _ in range(20)]
    asked = []
    for index in range(count):
        prompt = shared[: rng.randrange(20)] + [
            rng.randrange(2, VOCABULARY) for _ in range(rng.choice((1, 3, 8, 30)))
        ]
        asked.append(
            request(f"r{index}", prompt, rng.randrange(1, 14), seed=100 + index, arrival=index)
        )
    return asked


def draw_poison(rng: random.Random, asked: list[Request]) -> dict[int, int]:
    """One or two of them, each at a position that it will surely compute."""
    poison = {}
    for chosen in rng.sample(asked, min(len(asked), rng.choice((1, 1, 2)))):
        computed = len(chosen.prompt_token_ids) + chosen.stop.max_tokens - 1
        poison[chosen.seed] = rng.randrange(computed)
    return poison


def check(
    rig: Rig, worker: PoisonedWorker, asked: list[Request], answers: dict[str, Answer]
) -> None:
    core = rig.core()
    for own in asked:
        answer = answers[own.request_id]
        assert answer.error is None and answer.finish is not None
        right = expected_tokens(own.prompt_token_ids, own.stop.max_tokens, own.seed)
        before = max(0, worker.poison.get(own.seed, -1) - len(own.prompt_token_ids) + 1)
        if own.seed not in worker.poison:
            assert answer.tokens == right, "an innocent lost something"
            assert answer.finish.reason is FinishReason.LENGTH
        elif not core.ledger.config.enable_prefix_caching:
            assert answer.finish.reason is FinishReason.FAULT
            assert answer.tokens == right[:before], "up to the poison, and nothing behind it"
        else:  # a hit may have spared it the poisoned position
            assert answer.tokens == right[: len(answer.tokens)]
            assert len(answer.tokens) >= before
    invariants.check(core)
    stats = core.stats()
    assert stats.running == stats.waiting == stats.inflight == stats.kv_active_tokens == 0
    assert not core.ledger.suspects and not worker.machine.rows


@every_effect
@pytest.mark.parametrize("seed", spread(range(12), 3))
def test_the_poisoned_end_and_the_others_go_on(seed: int, effect: Effect) -> None:
    rng = random.Random(f"{seed} {effect}")
    asked = draw_requests(rng, rng.randrange(1, 9))
    machine = Machine(
        max_sequence_count=rng.randrange(1, 6),
        max_step_token_count=rng.choice((4, 16)),
        max_sequence_token_count=LONGEST,
        block_count=18 + rng.randrange(30),
    )
    worker = PoisonedWorker(machine, draw_poison(rng, asked), effect)
    chosen = ReplicaSettings(
        scheduling=SchedulingSettings(
            async_scheduling=rng.random() < 0.7, enable_prefix_caching=rng.random() < 0.7
        ),
        claim=ClaimPolicy(max_failed_claims=MAX_CLAIMS),
        check_invariants=True,
    )

    async def main(loop: VirtualLoop) -> None:
        async with running(loop, worker, chosen, seed) as rig:
            answers = {}
            for own in asked:
                answers[own.request_id] = rig.submit(own)
                await asyncio.sleep(rng.choice((0.0, 0.0, 0.01, 0.2)))
            await rig.settled(*answers.values())
            await asyncio.sleep(5.0)
            check(rig, worker, asked, answers)
            count = len(worker.poison)
            # A result that was on its way may count as progress once more.
            most = count if effect is Effect.NAMED else count * (MAX_CLAIMS + 2)
            assert worker.down_count <= most

    run_virtual(main)


@every_effect
def test_a_prompt_longer_than_a_step_does_not_hide_the_poison(effect: Effect) -> None:
    """Its chunks bring results in each claim, which once made the count start over: 156 losses in
    12 s, and nobody got anything."""

    async def main(loop: VirtualLoop) -> None:
        long_prompt = [2 + index % 90 for index in range(60)]
        asked = [request("long", long_prompt, 4, seed=1), request("bad", [5, 6], 20, seed=2)]
        worker = PoisonedWorker(Machine(max_step_token_count=4), {2: 10}, effect)
        async with running(loop, worker) as rig:
            answers = {own.request_id: rig.submit(own) for own in asked}
            began = loop.time()
            await rig.settled(*answers.values())
            await asyncio.sleep(1.0)
            check(rig, worker, asked, answers)
            assert worker.attach_count <= (2 if effect is Effect.NAMED else MAX_CLAIMS + 2)
            assert loop.time() - began < 10.0

    run_virtual(main)


def test_an_innocent_beside_a_worker_that_keeps_dying_is_not_ended() -> None:
    """The worker dies now and then by itself: whoever makes progress collects no strikes."""

    async def main(loop: VirtualLoop) -> None:
        worker = PoisonedWorker(Machine(), {}, Effect.DEAD)
        async with running(loop, worker) as rig:
            asked = [request(f"r{n}", [5, 6, n], 40, seed=n) for n in range(3)]
            answers = [rig.submit(own) for own in asked]
            for _ in range(20):
                await asyncio.sleep(0)
                worker.break_connection()
                worker.machine.restart()
                seen = len(answers[0].tokens)
                await until(lambda seen=seen: len(answers[0].tokens) > seen or answers[0].end_count)
            await rig.settled(*answers)
            for own, answer in zip(asked, answers, strict=True):
                assert answer.tokens == expected_tokens(own.prompt_token_ids, 40, own.seed)

    run_virtual(main)


@pytest.mark.parametrize("effect", [Effect.FAILED, Effect.DEAD])
def test_a_worker_that_fails_whoever_runs_is_found_out(effect: Effect) -> None:
    """Not one after another of a hundred is put on trial: they end, and may be sent again."""

    async def main(loop: VirtualLoop) -> None:
        asked = [request(f"r{n}", [5, 6, n % 90], 4, seed=n) for n in range(100)]
        poison = {own.seed: 0 for own in asked}
        worker = PoisonedWorker(Machine(max_sequence_count=16), dict(poison), effect)
        chosen = ReplicaSettings(
            scheduling=SchedulingSettings(enable_prefix_caching=False), check_invariants=True
        )
        async with running(loop, worker, chosen) as rig:
            began = loop.time()
            answers = [rig.submit(own) for own in asked]
            await rig.settled(*answers)
            assert loop.time() - began < 60.0
            assert worker.attach_count < 25
            assert sum(isinstance(answer.error, EngineLost) for answer in answers) >= 95
            worker.poison = {}
            await rig.attached()
            later = rig.submit(request("later", [5, 6], 4, arrival=loop.time()))
            await rig.settled(later)
            assert later.tokens == expected_tokens([5, 6], 4)

    run_virtual(main)


def test_claims_that_end_soon_come_ever_slower() -> None:
    """Results in each claim do not make them spin."""

    async def main(loop: VirtualLoop) -> None:
        worker = PoisonedWorker(Machine(max_step_token_count=4), {1: 50}, Effect.DEAD)
        chosen = ReplicaSettings(claim=ClaimPolicy(max_failed_claims=1_000_000))
        async with running(loop, worker, chosen) as rig:
            answer = rig.submit(request("a", list(range(2, 60)), 3, seed=1))
            await asyncio.sleep(60.0)
            assert 30 < worker.attach_count < 50, "about two seconds apart in the end"
            assert not answer.end_count
            rig.fleet.finish(request("a", [2], 1).request_id, FinishReason.CANCELLED)

    run_virtual(main)
