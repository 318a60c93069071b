"""The core in any order of events, against a worker that checks it and a model that is naive."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from control_plane.core import invariants
from control_plane.core.config import SchedulerConfig
from control_plane.core.errors import ResultMismatch
from control_plane.core.events import FinishReason
from control_plane.core.plan import Row, RowFault, StepResult
from control_plane.core.request import Request, RequestId, SamplingParams, StopConditions
from control_plane.core.tokens import Tokens
from tests.support.checking_worker import END
from tests.support.core_harness import Harness


def config_of(  # a pool that holds one sequence of the greatest length and little more
    size: int, length: int, spare: int, rows: int, budget: int, ahead: int, caching: bool
) -> SchedulerConfig:
    return SchedulerConfig(
        max_sequence_count=rows,
        max_step_token_count=budget,
        max_sequence_token_count=length,
        block_count=1 + -(-length // size) + spare,
        block_size=size,
        max_waiting_count=8,
        max_inflight_step_count=ahead,
        enable_prefix_caching=caching,
        ageing_seconds=2.0,
    )


configs = st.builds(
    config_of,
    size=st.integers(1, 4),
    length=st.integers(6, 20),
    spare=st.integers(0, 4),
    rows=st.integers(1, 4),
    budget=st.one_of(st.integers(1, 6), st.integers(7, 40)),
    ahead=st.integers(1, 3),
    caching=st.booleans(),
)
# Few distinct prompts, so that prefixes meet.
BASES = ((0,), (1, 2), (3, 4, 5))
STOPS = (frozenset[int](), frozenset({5}), frozenset({5, END}))

Ask = Callable[[int, float], Request]


def ask_of(
    base: tuple[int, ...],
    cut: int,
    max_tokens: int,
    stops: frozenset[int],
    ends: bool,
    priority: int,
    salt: str,
) -> Ask:
    """A request but for its number, which is its name and seed, and its arrival."""
    return lambda number, arrival: Request(
        request_id=RequestId(f"r{number}"),
        prompt_token_ids=(base * 20)[:cut],
        sampling=SamplingParams(),
        seed=number,
        stop=StopConditions(max_tokens, stops, frozenset({END} if ends else ())),
        arrival=arrival,
        priority=priority,
        cache_salt=salt,
    )


asks = st.builds(
    ask_of,
    base=st.sampled_from(BASES),
    cut=st.integers(1, 20),
    max_tokens=st.integers(1, 20),
    stops=st.sampled_from(STOPS),
    ends=st.booleans(),
    priority=st.integers(-2, 2),
    salt=st.sampled_from(["", "a", "b"]),
)


class CoreMachine(RuleBasedStateMachine):
    """Any order of everything the shell may do."""

    @initialize(config=configs)
    def start(self, config: SchedulerConfig) -> None:
        self.harness = Harness(config)

    @rule(asked=st.lists(asks, min_size=1, max_size=3))
    def submit(self, asked: list[Ask]) -> None:
        for ask in asked:
            self.harness.submit(ask(len(self.harness.salts), self.harness.now))

    @rule(faulty=st.one_of(st.none(), st.integers(0, 3)))
    def schedule(self, faulty: int | None) -> None:
        self.harness.schedule(faulty)

    @precondition(lambda self: self.harness.results)
    @rule(count=st.integers(1, 3))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.harness.results))):
            self.harness.deliver()

    @rule(count=st.integers(1, 16))
    def run(self, count: int) -> None:
        for _ in range(count):
            if self.harness.schedule() is None and self.harness.results:
                self.harness.deliver()

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.STOP]))
    def finish(self, data: st.DataObject, reason: FinishReason) -> None:
        self.harness.finish(data.draw(st.sampled_from(self.harness.live)), reason)

    @precondition(lambda self: self.harness.scheduler.has_work)
    @rule(caching=st.booleans(), size=st.integers(1, 4))
    def resync(self, caching: bool, size: int) -> None:
        self.harness.resync(caching, size)

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.harness.now += seconds

    @precondition(lambda self: self.harness.results)
    @rule(
        spoil=st.sampled_from(
            [
                lambda r: replace(r, step_id=r.step_id + 1),
                lambda r: replace(r, epoch=r.epoch + 1),
                lambda r: replace(
                    r, rows=[*r.rows, 0], tokens=Tokens([*r.tokens.ids, 0]), token_counts=[]
                ),
                lambda r: replace(r, tokens=Tokens([*r.tokens.ids, 0])),
                lambda r: replace(r, faults=[*r.faults, RowFault(Row(99), "INVALID_LOGITS", "")]),
            ]
        )
    )
    def misdeliver(self, spoil: Callable[[StepResult], StepResult]) -> None:
        before = self.harness.scheduler.stats()
        with pytest.raises(ResultMismatch):
            self.harness.scheduler.update(spoil(self.harness.results[0]))
        assert self.harness.scheduler.stats() == before

    @invariant()
    def books_balance(self) -> None:
        invariants.check(self.harness.scheduler)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=400, stateful_step_count=40, deadline=None, report_multiple_bugs=False
)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_crowd_gets_what_each_would_get_alone(seed: int) -> None:
    """Long runs under pressure, where a sequence is preempted and comes back many times."""
    chance = random.Random(seed)
    config = config_of(
        size=chance.randint(1, 4),
        length=chance.randint(6, 30),
        spare=chance.randint(0, 4),
        rows=chance.randint(2, 5),
        budget=chance.choice([1, 2, 3, 5, 8, 16, 40]),
        ahead=chance.randint(1, 3),
        caching=chance.random() < 0.7,
    )
    harness = Harness(replace(config, max_waiting_count=100))
    for number in range(25):
        ask = ask_of(
            base=chance.choice(BASES),
            cut=chance.randint(1, config.max_sequence_token_count - 1),
            max_tokens=chance.randint(1, 20),
            stops=chance.choice((STOPS[0], STOPS[0], STOPS[1])),
            ends=chance.random() < 0.2,
            priority=chance.randint(-2, 2),
            salt=chance.choice(["a", "a", "b"]),
        )
        harness.now += chance.random()
        harness.submit(ask(number, harness.now))
        for _ in range(chance.randint(0, 6)):
            if chance.random() < 0.01 and harness.live:
                harness.finish(chance.choice(harness.live), FinishReason.CANCELLED)
            faulty = 0 if chance.random() < 0.01 else None
            if harness.schedule(faulty) is None and harness.results:
                harness.deliver()
            invariants.check(harness.scheduler)
    harness.drain()
