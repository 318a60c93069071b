"""One request of 32 brings down every worker it runs on: it ends alone, and the others go on."""

from __future__ import annotations

import asyncio
import random

import pytest

from control_plane.core import invariants
from control_plane.core.events import FinishReason
from control_plane.core.plan import Row, StepPlan
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.poison import Effect, PoisonedWorker
from tests.simulation.rig import Answer, Rig, request, running, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread

STEP_SECONDS = 0.02
COUNT = 32
TOKENS = 30
every_effect = pytest.mark.parametrize("effect", Effect)


def fleet(
    count: int, poison: dict[int, int], effect: Effect, kind: type[PoisonedWorker] = PoisonedWorker
) -> list[PoisonedWorker]:
    return [
        kind(
            Machine(max_sequence_count=12, max_step_token_count=32, block_count=200),
            poison,
            effect,
            lambda: STEP_SECONDS,
        )
        for _ in range(count)
    ]


def prompt(seed: int) -> list[int]:
    return [5, 6, 2 + seed % 90, 2 + seed % 7]


def submit(rig: Rig, seeds: range) -> dict[int, Answer]:
    return {
        seed: rig.submit(request(f"r{seed}", prompt(seed), TOKENS, seed=seed, arrival=seed / 1e3))
        for seed in seeds
    }


def check(rig: Rig, poison: dict[int, int], answers: dict[int, Answer]) -> None:
    for seed, answer in answers.items():
        right = expected_tokens(prompt(seed), TOKENS, seed)
        assert answer.error is None and answer.finish is not None, seed
        if seed in poison:
            assert answer.finish.reason is FinishReason.FAULT
            assert answer.tokens == right[: len(answer.tokens)] and len(answer.tokens) < TOKENS
        else:
            assert (answer.tokens, answer.finish.reason) == (right, FinishReason.LENGTH), seed
    for number in range(len(rig.workers)):
        core = rig.core(number)
        invariants.check(core)
        stats = core.stats()
        assert stats.running == stats.waiting == stats.inflight == stats.kv_active_tokens == 0
        assert not core.ledger.suspects and not rig.workers[number].machine.rows


class Restarted(PoisonedWorker):
    """Its process takes a moment until another life answers."""

    seconds = 1.0

    def _go_down(self, plan: StepPlan, rows: list[Row]) -> None:
        if self.effect is Effect.DEAD:
            self.reachable = False
            asyncio.get_running_loop().call_later(self.seconds, self._come_back)
        super()._go_down(plan, rows)

    def _come_back(self) -> None:
        self.reachable = True


@every_effect
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", [PoisonedWorker, Restarted])
@pytest.mark.parametrize("seed", spread(range(2), 1))
def test_it_alone_ends_within_ten_seconds(
    seed: int, kind: type[PoisonedWorker], count: int, effect: Effect
) -> None:
    rng = random.Random(f"{seed} {count} {effect}")
    guilty = rng.randrange(1, COUNT + 1)
    poison = {guilty: rng.choice((0, 2, 5, 12, 20))}
    workers = fleet(count, poison, effect, kind)

    async def main(loop: VirtualLoop) -> None:
        async with running(loop, workers, seed=seed) as rig:
            answers = submit(rig, range(1, COUNT + 1))
            began = loop.time()
            await until(lambda: answers[guilty].end_count)
            assert loop.time() - began <= 10.0
            await rig.settled(*answers.values())
            await rig.attached()
            await asyncio.sleep(5.0)
            check(rig, poison, answers)
            assert sum(worker.down_count for worker in workers) <= 7

    run_virtual(main)


def test_the_innocent_go_on_elsewhere_while_it_is_tried() -> None:
    """It takes a minute until its worker is back; nobody but itself waits for that."""

    class Slow(Restarted):
        seconds = 50.0

    poison = {3: 6}
    workers = fleet(3, poison, Effect.DEAD, Slow)

    async def main(loop: VirtualLoop) -> None:
        async with running(loop, workers) as rig:
            answers = submit(rig, range(1, COUNT + 1))
            others = [answer for seed, answer in answers.items() if seed != 3]
            await rig.settled(*others)
            assert loop.time() < 10.0
            assert sum(not worker.reachable for worker in workers) <= 2, "one is left in peace"
            more = submit(rig, range(101, 120))
            await rig.settled(*more.values())
            assert loop.time() < 20.0
            await rig.settled(answers[3])
            await rig.attached()
            await asyncio.sleep(5.0)
            check(rig, poison, answers | more)

    run_virtual(main)


@pytest.mark.parametrize("effect", [Effect.UNNAMED, Effect.FAILED, Effect.DEAD, Effect.BROKEN])
def test_a_worker_that_fails_whoever_runs_costs_nobody_anything(effect: Effect) -> None:
    """Others execute what it could not: nobody is convicted by one worker."""

    async def main(loop: VirtualLoop) -> None:
        broken, sound = workers = fleet(2, {}, effect)
        broken.poison = dict.fromkeys(range(1, COUNT + 1), 0)
        async with running(loop, workers) as rig:
            answers = submit(rig, range(1, COUNT + 1))
            await rig.settled(*answers.values())
            assert loop.time() < 60.0
            broken.poison = {}
            await rig.attached()
            await asyncio.sleep(5.0)
            check(rig, {}, answers)
            assert sound.down_count == 0

    run_virtual(main)
