"""A hang is told from a long step by what steps have taken, whatever a step costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core.plan import (
    Message,
    Row,
    SamplePlan,
    ScheduledRows,
    StepPlan,
    WeightVersion,
)
from control_plane.core.progress import (
    FIRST_SECONDS,
    FIRST_SECONDS_OF_TOKEN,
    LEAST_SECONDS,
    LONGEST_FACTOR,
    TIMES,
    Progress,
    Work,
    work_of,
)
from tests.support.quick import examples

WEIGHTS = WeightVersion(1, "a" * 64)


def step(*rows: tuple[int, int]) -> StepPlan:
    """A plan whose rows start at a position and compute so many tokens."""
    return StepPlan(
        1,
        1,
        WEIGHTS,
        [],
        [],
        ScheduledRows(
            rows=[Row(index) for index in range(len(rows))],
            start_positions=[start for start, _ in rows],
            token_counts=[count for _, count in rows],
        ),
    )


@dataclass(frozen=True)
class Prices:
    """What a step takes, in seconds."""

    step: float
    row: float
    token: float
    kilotoken: float

    def of(self, work: Work) -> float:
        return (
            self.step
            + self.row * work.row_count
            + self.token * work.token_count
            + self.kilotoken * work.attended_count / 1000
        )


decodes = st.lists(st.tuples(st.integers(0, 100_000), st.just(1)), min_size=1, max_size=64)
prefills = st.tuples(st.sampled_from([0, 512, 65_536]), st.sampled_from([1, 7, 16, 512, 8192])).map(
    lambda own: [own]
)
mixed = st.tuples(decodes, prefills).map(lambda own: own[0] + own[1])
plans = st.one_of(decodes, prefills, mixed, st.just([])).map(lambda rows: step(*rows))
samples = st.integers(1, 64).map(lambda n: SamplePlan(1, 1, [Row(row) for row in range(n)]))
messages = st.one_of(plans, plans, plans, samples)
prices = st.builds(
    Prices,
    step=st.sampled_from([1e-4, 3e-3, 0.5, 4.0]),
    row=st.sampled_from([0.0, 1e-5, 1e-2]),
    token=st.sampled_from([0.0, 1e-6, 1e-4, 5e-2]),
    kilotoken=st.sampled_from([0.0, 1e-8, 1e-6]),
)


@settings(max_examples=examples(300), deadline=None)
@given(
    prices,
    st.lists(st.tuples(messages, st.floats(1.0, TIMES)), min_size=1, max_size=120),
    st.integers(1, 4),
)
def test_no_step_within_five_times_the_model_is_overdue(
    cost: Prices, steps: list[tuple[Message, float]], depth: int
) -> None:
    """From the second on, whatever sizes came before; several may be in flight."""
    progress = Progress()
    progress.attached(same_life=False)
    now = 10.0
    pending: list[tuple[Message, float]] = []
    is_known = False
    for own in [*steps, *[None] * depth]:
        if own is not None:
            progress.sent(own[0], now)
            pending.append(own)
        if len(pending) == depth or (own is None and pending):
            message, slowness = pending.pop(0)
            seconds = cost.of(work_of(message)) * slowness
            if is_known:
                assert progress.limit() >= min(seconds, FIRST_SECONDS) - 1e-9
                assert progress.waited(now + seconds) == pytest.approx(seconds)
            now += seconds
            progress.answered(now)
            is_known = True


@settings(max_examples=examples(200), deadline=None)
@given(prices, st.lists(messages, min_size=30, max_size=60), messages)
def test_a_hang_is_found_in_bounded_time(cost: Prices, steps: list[Message], last: Message) -> None:
    """In five times what the dearest step before it would have cost, scaled to its size."""
    progress = Progress()
    progress.attached(same_life=False)
    now = 0.0
    for message in steps:
        progress.sent(message, now)
        now += cost.of(work_of(message))
        progress.answered(now)
    progress.sent(last, now)
    limit, work = progress.limit(), work_of(last)
    assert math.isfinite(limit)
    seen = [work_of(message) for message in steps]
    bounds = [work.times(own) * cost.of(own) for own in seen]
    most = max(LEAST_SECONDS, TIMES * min(bounds))
    first = FIRST_SECONDS + FIRST_SECONDS_OF_TOKEN * work.token_count
    # The kinds are coarse: a step stands for those up to twice its size.
    assert limit <= max(2 * most, first)
    assert progress.waited(now + limit) >= limit - 1e-6


def test_the_same_step_again_has_three_seconds_or_five_times() -> None:
    for seconds in (0.01, 0.3, 0.6, 2.0, 40.0):
        progress = Progress()
        progress.attached(same_life=False)
        progress.sent(step((100, 1)), 0.0)
        progress.answered(seconds)
        progress.sent(step((100, 1)), seconds)
        assert progress.limit() == pytest.approx(max(LEAST_SECONDS, TIMES * seconds))


def test_a_long_prefill_has_time_by_its_tokens() -> None:
    progress = Progress()
    progress.attached(same_life=False)
    progress.sent(step((0, 16)), 0.0)
    progress.answered(1.0)
    progress.sent(step((0, 512)), 1.0)
    assert progress.limit() >= TIMES * 32.0
    progress.answered(33.0)
    progress.sent(step((0, 16)), 33.0)
    assert progress.limit() <= TIMES * 1.0, "a small step has no more than before"


def test_the_first_step_of_a_life_may_take_long() -> None:
    progress = Progress()
    for life in range(3):
        progress.attached(same_life=False)
        progress.sent(step((0, 512)), 0.0)
        assert progress.limit() == pytest.approx(FIRST_SECONDS + 512 * FIRST_SECONDS_OF_TOKEN)
        progress.answered(20.0)
        progress.sent(step((512, 1)), 20.0)
        assert progress.limit() <= TIMES * 20.0, life


def test_what_is_known_outlasts_a_reconnect() -> None:
    progress = Progress()
    progress.attached(same_life=False)
    progress.sent(step((5, 1)), 0.0)
    progress.answered(0.01)
    progress.sent(step((6, 1)), 0.1)
    progress.attached(same_life=True)
    assert progress.waited(50.0) == 0.0 and progress.limit() == math.inf, "nothing is in flight"
    progress.sent(step((6, 1)), 50.0)
    assert progress.limit() == LEAST_SECONDS


def test_a_worker_that_is_never_known_gets_longer_each_time() -> None:
    """A first step that was cut short and tried again would never come to its end."""
    progress = Progress()
    limits = []
    for _ in range(8):
        progress.attached(same_life=True)
        progress.sent(step((0, 1)), 0.0)
        limits.append(progress.limit())
    first = FIRST_SECONDS + FIRST_SECONDS_OF_TOKEN
    assert limits[:4] == pytest.approx([first, 2 * first, 4 * first, 8 * first])
    assert limits[-1] == pytest.approx(LONGEST_FACTOR * first), "but not without end"


def test_one_stall_does_not_hide_a_hang() -> None:
    progress = Progress()
    progress.attached(same_life=False)
    now = 0.0
    for index in range(60):
        progress.sent(step((index, 1)), now)
        now += 100.0 if index == 5 else 0.01
        progress.answered(now)
    progress.sent(step((60, 1)), now)
    assert progress.limit() < 5.0


def test_a_burst_of_results_is_not_taken_for_quick_steps() -> None:
    """We were late, not the worker quick: its own clock tells."""
    progress = Progress()
    progress.attached(same_life=False)
    for _ in range(3):
        progress.sent(step((0, 512)), 0.0)
    for _ in range(3):
        progress.answered(30.0, executed_seconds=10.0)
    progress.sent(step((0, 512)), 30.0)
    assert progress.limit() >= TIMES * 10.0


@pytest.mark.parametrize("seconds", [1.0, 60.0, 86_400.0])
def test_our_own_pause_is_not_the_workers(seconds: float) -> None:
    progress = Progress()
    progress.attached(same_life=False)
    progress.sent(step((0, 1)), 0.0)
    progress.answered(0.01)
    progress.sent(step((1, 1)), 1.0)
    progress.stopped(seconds, 2.0 + seconds)
    assert progress.waited(2.0 + seconds) == pytest.approx(1.0)
    progress.stopped(seconds, 2.5 + seconds)
    assert progress.waited(2.5 + seconds) >= 0.0, "a pause begins no step in the future"


def test_kinds_are_bounded() -> None:
    progress = Progress()
    progress.attached(same_life=False)
    for index in range(2000):
        rows = [(index * 37 % 90_000, 1 + index % 300)] * (1 + index % 90)
        progress.sent(step(*rows), float(index))
        progress.answered(index + 0.5)
    assert len(progress._seen) <= 64


def test_an_answer_to_nothing_is_somebody_elses_to_refuse() -> None:
    progress = Progress()
    progress.answered(1.0)
    assert progress.limit() == math.inf


@pytest.mark.parametrize(
    ("message", "work"),
    [
        (step(), Work(0, 0, 0)),
        (step((0, 4)), Work(1, 4, 16)),
        (step((10, 1), (20, 1)), Work(2, 2, 32)),
        (step((10, 1), (0, 8)), Work(2, 9, 11 + 64)),
        (SamplePlan(1, 1, [Row(0), Row(3)]), Work(2, 0, 0)),
    ],
)
def test_the_work_of_a_message(message: Message, work: Work) -> None:
    assert work_of(message) == work


@pytest.mark.parametrize("stage_count", [1, 2, 4, 8])
@pytest.mark.parametrize("slot", [0.5, 1.0, 4.0])
def test_a_step_alone_in_a_pipeline_is_not_overdue(stage_count: int, slot: float) -> None:
    """Answers come once for every stage's time while all stages work; a step by itself takes all
    of them. Of one stage nothing is different."""
    progress = Progress()
    progress.attached(same_life=False, stage_count=stage_count)
    message, now = step((10, 1)), 0.0
    for _ in range(stage_count + 1):
        progress.sent(message, now)
    now = stage_count * slot
    for _ in range(40):
        progress.answered(now)
        progress.sent(message, now)
        now += slot
    for _ in range(stage_count + 1):
        progress.answered(now)
        now += slot
    for _ in range(20):
        progress.sent(message, now)
        alone = stage_count * slot
        limit = progress.limit()
        assert limit == pytest.approx(max(LEAST_SECONDS, TIMES * alone))
        now += alone
        progress.answered(now)


def test_answers_that_are_read_late_hide_no_stage() -> None:
    """This process slept, and then read all at once: the worker's own clock is what is left."""
    progress = Progress()
    progress.attached(same_life=False, stage_count=4)
    message, now = step((10, 1)), 0.0
    for _ in range(5):
        progress.sent(message, now)
    now = 40.0
    for _ in range(5):
        progress.answered(now, 2.0)
    progress.sent(message, now)
    assert progress.limit() >= TIMES * 4 * 2.0
