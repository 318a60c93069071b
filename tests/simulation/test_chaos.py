"""Whole runs under random loss, delay, restart, rival claims and cancels; a seed replays a run.

Once with one replica, once with two. `pytest tests/simulation -k "chaos and 17"` runs seed 17
alone.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from functools import cache

import pytest

from control_plane.core import invariants
from control_plane.core.claim import ClaimPolicy
from control_plane.core.events import FinishReason
from control_plane.core.plan import StepPlan, StepResult
from control_plane.core.request import Request
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.ports import WorkerLost
from control_plane.shell.replica import ReplicaSettings
from tests.simulation.fake_worker import VOCABULARY, FakeWorker, Machine, expected_tokens
from tests.simulation.rig import Answer, Rig, request, running
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.quick import spread

SEEDS = range(60)
TWO_REPLICA_SEEDS = range(200, 240)
EVERY = 4
"""`make check` runs every fourth seed; those have to reach what they should, too."""


class FlakyWorker(FakeWorker):
    """Loses connections on its own: before a plan, or after it was executed and before its result
    was told."""

    def __init__(self, machine: Machine, rng: random.Random, loss_rate: float) -> None:
        super().__init__(machine, self._draw_delay)
        self._rng = rng
        self._loss_rate = loss_rate
        self.calm = False

    def _draw_delay(self) -> float:
        return self._rng.choice((0.0, 0.001, 0.01, 0.01, 0.1, 1.0))

    async def send(self, plan: StepPlan) -> None:
        if self._strikes():
            self.break_connection(self._rng.randrange(3))
        await super().send(plan)

    async def receive(self) -> StepResult:
        result = await super().receive()
        if self._strikes():
            self.break_connection(self._rng.randrange(3))
            raise WorkerLost("after the step was executed")
        return result

    def _strikes(self) -> bool:
        return not self.calm and self._rng.random() < self._loss_rate


@dataclass(slots=True, eq=False)
class Run:
    """What a seed's run came to."""

    requests: list[Request] = field(default_factory=list)
    answers: dict[str, Answer] = field(default_factory=dict)
    placed: list[set[int]] = field(default_factory=list)
    """Per replica, the seeds of the requests that its worker was given."""
    attach_count: int = 0
    preemptions: int = 0
    ended_at: float = 0.0


def draw_request(rng: random.Random, index: int, arrival: float, longest: int) -> Request:
    """Prompts share prefixes often, so that the prefix cache has work."""
    shared = list(range(2, 2 + rng.randrange(0, 20)))
    own = [rng.randrange(2, VOCABULARY) for _ in range(rng.randrange(1, 12))]
    prompt = (shared + own)[: longest - 1]
    return request(
        f"r{index}",
        prompt,
        rng.randrange(1, 40),
        arrival=arrival,
        seed=1000 * index + rng.randrange(1000),  # names the request in a worker's plans
        stop_token_ids=[rng.randrange(2, VOCABULARY)] if rng.random() < 0.3 else [],
        priority=rng.randrange(-3, 4),
    )


async def strike(rig: Rig, worker: FlakyWorker, rng: random.Random) -> None:
    """Now and then something happens to a worker as a whole."""
    machine = worker.machine
    while True:
        await asyncio.sleep(rng.expovariate(1.0))
        match rng.randrange(5):
            case 0:
                worker.break_connection(rng.randrange(3))
            case 1:
                machine.restart()
                worker.break_connection()
            case 2:
                worker.reachable = False
                worker.break_connection()
                await asyncio.sleep(rng.uniform(0.0, 5.0))
                worker.reachable = True
            case 3:
                machine.claim(machine.epoch + rng.randrange(1, 4))
            case _:
                assert rig.stats().inflight <= 2


async def ask(rig: Rig, rng: random.Random, run: Run, longest: int) -> None:
    """Requests come in bursts; some clients leave."""
    for index in range(rng.randrange(1, 25)):
        await asyncio.sleep(rng.choice((0.0, 0.0, 0.0, 0.01, 0.5)))
        asked = draw_request(rng, index, rig.loop.time(), longest)
        run.requests.append(asked)
        run.answers[asked.request_id] = rig.submit(asked)
        if rng.random() < 0.2:
            rig.group.create_task(leave(rig, asked, rng.expovariate(2.0)))


async def leave(rig: Rig, asked: Request, after: float) -> None:
    await asyncio.sleep(after)
    rig.fleet.finish(asked.request_id, FinishReason.CANCELLED)


def draw_machine(rng: random.Random, longest: int) -> Machine:
    block_size = rng.choice((1, 3, 4, 16))
    least = -(-longest // block_size) + 1
    return Machine(
        max_sequence_count=rng.randrange(1, 6),
        max_step_token_count=rng.randrange(6, 40),
        max_sequence_token_count=longest,
        block_count=least + rng.randrange(0, least * 2),
        block_size=block_size,
    )


async def simulate(
    loop: VirtualLoop, seed: int, *, synchronous: bool | None = None, replica_count: int = 1
) -> Run:
    rng = random.Random(seed)
    longest = rng.choice((24, 48, 64))
    machines = [draw_machine(rng, longest) for _ in range(replica_count)]
    drawn_synchronous = rng.random() < 0.3
    settings = ReplicaSettings(
        scheduling=SchedulingSettings(
            async_scheduling=not (drawn_synchronous if synchronous is None else synchronous),
            enable_prefix_caching=rng.random() < 0.8,
        ),
        claim=ClaimPolicy(
            loss_patience=1e9,
            contention_delay=1.0,
            longest_contention_delay=5.0,
            max_failed_claims=1_000_000,
        ),
        check_invariants=True,
    )
    workers = [
        FlakyWorker(machine, random.Random(f"{seed} {number}"), rng.choice((0.0, 0.01, 0.05)))
        for number, machine in enumerate(machines)
    ]
    run = Run()
    async with running(loop, workers, settings, seed) as rig:
        chaos = [
            rig.group.create_task(strike(rig, worker, random.Random(f"{seed} strike {number}")))
            for number, worker in enumerate(workers)
        ]
        await ask(rig, random.Random(seed + 3), run, longest)
        await asyncio.sleep(20.0)
        for task in chaos:
            task.cancel()
        await asyncio.wait(chaos)
        for worker in workers:
            worker.calm = worker.reachable = True
        await rig.settled(*run.answers.values())
        await asyncio.sleep(20.0)
        for number, worker in enumerate(workers):
            check_end(rig, number, worker)
            run.preemptions += rig.stats(number).preemptions
            run.attach_count += worker.attach_count
        assert rig.fleet.ready
    run.placed = [
        {added.seed for plan in machine.executed_plans for added in plan.added}
        for machine in machines
    ]
    run.ended_at = loop.time()
    return run


def check_end(rig: Rig, number: int, worker: FlakyWorker) -> None:
    """Nothing runs, nothing is held, nothing was miscounted."""
    core = rig.core(number)
    invariants.check(core)
    stats = core.stats()
    assert stats.running == stats.waiting == stats.inflight == 0
    assert stats.submitted + stats.moved_in == stats.moved_out + sum(stats.finished.values())
    assert stats.finished[FinishReason.FAULT] == 0
    assert not worker.machine.rows, "the worker still holds rows"


def check_answer(asked: Request, answer: Answer) -> None:
    assert answer.end_count == 1
    assert answer.error is None
    assert answer.finish is not None
    expected = expected_tokens(asked.prompt_token_ids, len(answer.tokens), asked.seed)
    assert answer.tokens == expected, "a token was lost, doubled or wrong"
    stops = [token in asked.stop.stop_token_ids for token in answer.tokens]
    match answer.finish.reason:
        case FinishReason.LENGTH:
            assert not any(stops)
            assert len(answer.tokens) <= asked.stop.max_tokens
        case FinishReason.STOP:
            assert stops.count(True) == 1 and stops[-1]
        case FinishReason.CANCELLED:
            assert len(answer.tokens) < asked.stop.max_tokens
        case FinishReason.FAULT:
            pytest.fail("no row can fault here")
    usage = answer.finish.usage
    assert usage.completion_tokens == len(answer.tokens)
    assert usage.prompt_tokens == len(asked.prompt_token_ids)
    assert 0 <= usage.cached_prompt_tokens < usage.prompt_tokens


@cache
def chaos(seed: int, replica_count: int = 1) -> Run:
    """A seed's run, which several tests look at."""
    return run_virtual(lambda loop: simulate(loop, seed, replica_count=replica_count))


@pytest.mark.parametrize("seed", spread(SEEDS, len(SEEDS) // EVERY))
def test_chaos_loses_nothing(seed: int) -> None:
    run = chaos(seed)
    for asked in run.requests:
        check_answer(asked, run.answers[asked.request_id])


@pytest.mark.parametrize("seed", spread(TWO_REPLICA_SEEDS, len(TWO_REPLICA_SEEDS) // EVERY))
def test_chaos_with_two_replicas_loses_nothing(seed: int) -> None:
    run = chaos(seed, 2)
    for asked in run.requests:
        check_answer(asked, run.answers[asked.request_id])


def test_the_two_replica_seeds_use_both() -> None:
    runs = [chaos(seed, 2) for seed in TWO_REPLICA_SEEDS[::EVERY]]
    for number in (0, 1):
        assert sum(len(run.placed[number]) for run in runs) > 3 * len(runs)
    assert sum(run.attach_count for run in runs) > 10 * len(runs)


def test_the_seeds_reach_what_they_should() -> None:
    """A simulation in which nothing goes wrong proves nothing."""
    runs = [chaos(seed) for seed in SEEDS[::EVERY]]
    assert sum(run.attach_count for run in runs) > 5 * len(runs)
    assert sum(run.preemptions for run in runs) > len(runs)
    finishes = [answer.finish for run in runs for answer in run.answers.values()]
    reasons = {finish.reason for finish in finishes if finish is not None}
    assert reasons == {FinishReason.LENGTH, FinishReason.STOP, FinishReason.CANCELLED}
    hits = [finish.usage.cached_prompt_tokens for finish in finishes if finish is not None]
    assert sum(hits) > 0


@pytest.mark.parametrize("seed", [3, 11])
def test_a_seed_replays(seed: int) -> None:
    first, second = (run_virtual(lambda loop: simulate(loop, seed)) for _ in range(2))
    assert first.ended_at == second.ended_at
    assert first.attach_count == second.attach_count
    for name, answer in first.answers.items():
        assert answer.tokens == second.answers[name].tokens


@pytest.mark.parametrize("seed", spread(range(100, 110), 3))
def test_sync_and_async_give_the_same_tokens(seed: int) -> None:
    """Where no client leaves; one that does is cut at another token."""
    runs = [
        run_virtual(lambda loop, mode=mode: simulate(loop, seed, synchronous=mode))
        for mode in (False, True)
    ]
    for name, answer in runs[0].answers.items():
        other = runs[1].answers[name]
        finishes = (answer.finish, other.finish)
        if all(f is not None and f.reason is not FinishReason.CANCELLED for f in finishes):
            assert answer.tokens == other.tokens
