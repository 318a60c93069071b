"""The core in any order of events, against a worker that checks it and a model that is naive."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import event, given, settings
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
from control_plane.core.request import (
    Adapter,
    OutputKind,
    Request,
    RequestId,
    SamplingParams,
    StopConditions,
)
from control_plane.core.tokens import Tokens
from control_plane.core.weights import InFlightPolicy
from tests.support.checking_worker import END
from tests.support.core_harness import Harness
from tests.support.naive_model import Pair
from tests.support.quick import examples


def config_of(  # a pool that holds one sequence of the greatest length and little more
    size: int,
    length: int,
    spare: int,
    rows: int,
    budget: int,
    ahead: int,
    caching: bool,
    drafts: int = 0,
    stages: int = 1,
    slots: int = 0,
) -> SchedulerConfig:
    return SchedulerConfig(
        max_sequence_count=rows,
        max_step_token_count=budget,
        max_sequence_token_count=length,
        block_count=1 + -(-length // size) + spare,
        block_size=size,
        max_waiting_count=8,
        max_inflight_step_count=ahead,
        pipeline_stage_count=stages,
        enable_prefix_caching=caching,
        ageing_seconds=2.0,
        max_draft_token_count=drafts,
        adapter_slot_count=slots,
    )


configs = st.builds(
    config_of,
    size=st.integers(1, 4),
    length=st.integers(6, 20),
    spare=st.integers(0, 4),
    rows=st.integers(1, 4),
    budget=st.one_of(st.integers(1, 6), st.integers(7, 40)),
    ahead=st.integers(1, 6),
    caching=st.booleans(),
    drafts=st.integers(0, 3),
    stages=st.sampled_from((1, 1, 2, 3, 5)),
    slots=st.integers(0, 3),
)
# Few distinct prompts, so that prefixes meet.
BASES = ((0,), (1, 2), (3, 4, 5))
STOPS = (frozenset[int](), frozenset({5}), frozenset({5, END}))
# Stop strings; the second may be complete with a token that is a stop token too.
PAIRS: tuple[Pair | None, ...] = (None, None, (2, 3), (4, 5))
FINISH = InFlightPolicy.FINISH_ON_OLD
ADAPTERS = (None, *(Adapter(f"name of {digest}", digest) for digest in "pqrst"))
KINDS = (OutputKind.SAMPLE, OutputKind.SAMPLE, OutputKind.HOLD)

Ask = tuple[Callable[[int, float], Request], Pair | None]


def ask_of(
    base: tuple[int, ...],
    cut: int,
    max_tokens: int,
    stops: frozenset[int],
    ends: bool,
    priority: int,
    salt: str,
    output: OutputKind = OutputKind.SAMPLE,
    pair: Pair | None = None,
    adapter: Adapter | None = None,
) -> Ask:
    """A request but for its number, which is its name and seed, and its arrival; and its stop
    string."""

    def make(number: int, arrival: float) -> Request:
        return Request(
            request_id=RequestId(f"r{number}"),
            prompt_token_ids=(base * 20)[:cut],
            sampling=SamplingParams(),
            seed=number,
            stop=StopConditions(max_tokens, stops, frozenset({END} if ends else ())),
            arrival=arrival,
            priority=priority,
            cache_salt=salt,
            output=output,
            adapter=adapter,
        )

    return make, pair


asks = st.builds(
    ask_of,
    base=st.sampled_from(BASES),
    cut=st.integers(1, 20),
    max_tokens=st.integers(1, 20),
    stops=st.sampled_from(STOPS),
    ends=st.booleans(),
    priority=st.integers(-2, 2),
    salt=st.sampled_from(["", "a", "b"]),
    output=st.sampled_from(KINDS),
    pair=st.sampled_from(PAIRS),
    adapter=st.sampled_from(ADAPTERS),
)


class CoreMachine(RuleBasedStateMachine):
    """Any order of everything the shell may do."""

    @initialize(config=configs)
    def start(self, config: SchedulerConfig) -> None:
        self.harness = Harness(config)

    @rule(asked=st.lists(asks, min_size=1, max_size=3), cut=st.sampled_from((0, 0, 1, 2, 5, 20)))
    def submit(self, asked: list[Ask], cut: int) -> None:
        for make, pair in asked:
            self.harness.submit(make(len(self.harness.salts), self.harness.now), pair, cut)

    @rule(faulty=st.one_of(st.none(), st.integers(0, 3)))
    def send(self, faulty: int | None) -> None:
        self.harness.send(faulty)

    @precondition(lambda self: self.harness.sent)
    @rule(count=st.integers(1, 3))
    def execute(self, count: int) -> None:
        for _ in range(min(count, len(self.harness.sent))):
            self.harness.execute()

    @precondition(lambda self: self.harness.outstanding)
    @rule(count=st.integers(1, 3))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, self.harness.outstanding)):
            self.harness.deliver()

    @rule(count=st.integers(1, 16))
    def run(self, count: int) -> None:
        for _ in range(count):
            if self.harness.send() is None and self.harness.outstanding:
                self.harness.deliver()

    @precondition(lambda self: self.harness.unmasked)
    @rule(data=st.data(), every=st.booleans())
    def allow(self, data: st.DataObject, every: bool) -> None:
        names = sorted(self.harness.unmasked)
        for name in names if every else [data.draw(st.sampled_from(names))]:
            self.harness.allow(name)

    @precondition(lambda self: self.harness.live)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.CANCELLED, FinishReason.STOP]))
    def finish(self, data: st.DataObject, reason: FinishReason) -> None:
        self.harness.finish(data.draw(st.sampled_from(self.harness.live)), reason)

    @precondition(lambda self: self.harness.scheduler.has_work)
    @rule(caching=st.booleans(), size=st.integers(1, 4))
    def resync(self, caching: bool, size: int) -> None:
        self.harness.resync(caching, size)

    @precondition(lambda self: self.harness.scheduler.has_work)
    @rule(executed_count=st.integers(0, 3))
    def reconnect(self, executed_count: int) -> None:
        self.harness.reconnect(executed_count)

    @rule(policy=st.sampled_from(InFlightPolicy), digest=st.sampled_from(["w", "x", "y"]))
    def switch(self, policy: InFlightPolicy, digest: str) -> None:
        self.harness.switch(policy, digest)

    @rule(is_closing=st.booleans())
    def close(self, is_closing: bool) -> None:
        self.harness.scheduler.close(is_closing=is_closing)

    @precondition(lambda self: self.harness.loads)
    @rule(index=st.integers(0, 3), fails=st.sampled_from((False, False, False, True)))
    def answer_load(self, index: int, fails: bool) -> None:
        self.harness.answer_load(index, fails=fails)

    @rule(pinned=st.sets(st.sampled_from("pqrst"), max_size=3))
    def pin(self, pinned: set[str]) -> None:
        self.harness.scheduler.adapters.pin(frozenset(pinned))

    @rule(seconds=st.floats(0.0, 5.0))
    def wait(self, seconds: float) -> None:
        self.harness.now += seconds

    @precondition(lambda self: self.harness.outstanding)
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
        result = self.harness.oldest_result()
        before = self.harness.scheduler.stats()
        with pytest.raises(ResultMismatch):
            self.harness.scheduler.update(spoil(result))
        assert self.harness.scheduler.stats() == before

    @invariant()
    def books_balance(self) -> None:
        invariants.check(self.harness.scheduler)

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.drain()
            for state, count in self.harness.reached.items():
                if count:
                    event(state)


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(
    max_examples=examples(400), stateful_step_count=40, deadline=None, report_multiple_bugs=False
)


def run_crowd(seed: int) -> Harness:
    """A long run under pressure, where a sequence is preempted and comes back many times."""
    chance = random.Random(seed)
    config = config_of(
        size=chance.randint(1, 4),
        length=chance.randint(6, 30),
        spare=chance.randint(0, 4),
        rows=chance.randint(2, 5),
        budget=chance.choice([1, 2, 3, 5, 8, 16, 40]),
        ahead=chance.randint(1, 3),
        caching=chance.random() < 0.7,
        drafts=chance.choice([0, 0, 1, 3]),
        slots=chance.choice([0, 1, 2, 3]),
    )
    stages = seed % 4 + 1 if seed % 3 == 0 else 1
    ahead = config.max_inflight_step_count
    config = replace(
        config, pipeline_stage_count=stages, max_inflight_step_count=ahead + stages - 1
    )
    harness = Harness(replace(config, max_waiting_count=100))
    for number in range(25):
        make, pair = ask_of(
            base=chance.choice(BASES),
            cut=chance.randint(1, config.max_sequence_token_count - 1),
            max_tokens=chance.randint(1, 20),
            stops=chance.choice((STOPS[0], STOPS[0], STOPS[1])),
            ends=chance.random() < 0.2,
            priority=chance.randint(-2, 2),
            salt=chance.choice(["a", "a", "b"]),
            output=chance.choice(KINDS),
            pair=chance.choice(PAIRS),
            adapter=chance.choice(ADAPTERS),
        )
        harness.now += chance.random()
        cut = chance.choice([0, 0, 1, 3, 20])
        harness.submit(make(number, harness.now), pair, cut)
        for _ in range(chance.randint(0, 6)):
            disturb(harness, chance)
            faulty = 0 if chance.random() < 0.01 else None
            if harness.send(faulty) is None and harness.outstanding:
                harness.deliver()
            invariants.check(harness.scheduler)
    harness.drain()
    return harness


def disturb(harness: Harness, chance: random.Random) -> None:
    """What happens now and then between two messages."""
    if harness.unmasked and chance.random() < 0.5:
        harness.allow(chance.choice(sorted(harness.unmasked)))
    if harness.live and chance.random() < 0.01:
        harness.finish(chance.choice(harness.live), FinishReason.CANCELLED)
    if harness.loads and chance.random() < 0.3:
        harness.answer_load(chance.randint(0, 3), fails=chance.random() < 0.05)
    if harness.sent and chance.random() < 0.3:
        harness.execute()
    if chance.random() < 0.02:
        harness.reconnect(chance.randint(0, 3))
    if chance.random() < 0.02:
        policy = chance.choice(list(InFlightPolicy))
        harness.switch(policy, chance.choice("wxy"))


@settings(max_examples=examples(200), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_a_crowd_gets_what_each_would_get_alone(seed: int) -> None:
    run_crowd(seed)


def test_the_crowds_reach_what_they_should() -> None:
    """A crowd to which nothing happens proves nothing."""
    reached = Counter[str]()
    for seed in range(60):
        reached += run_crowd(seed).reached
    for state in (
        "rows with several tokens",
        "drafts behind open drafts",
        "held beside sampled",
        "samples of several rows",
        "samples beside steps in flight",
        "parked",
        "unparked",
        "reconnects with KV kept",
        "hits right after a reconnect",
        "resumed",
        "several weights",
        "tokens of kept KV",
        "closed slots",
        "beside adapters' waiters",
        *(f"switched: {policy.value}" for policy in InFlightPolicy if policy is not FINISH),
        "turns of others",
    ):
        assert reached[state] > 5, f"{state}: {reached[state]} times"
