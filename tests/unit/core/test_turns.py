"""Rows that decode are spread over the steps that the stages of a pipeline work on at once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from control_plane.core import invariants
from control_plane.core.events import FinishReason
from control_plane.core.plan import StepPlan
from control_plane.core.scheduler import Scheduler
from tests.support.core_requests import add, config, planned, request, result, scheduler_of
from tests.support.core_requests import sequence as named

PROMPT = 2
ROUNDS = 20
LONG = 600


@dataclass
class Stages:
    """A pipeline whose stages take one tick for each step, and what each of them did when.

    The first stage begins a step when the tokens that it goes on from have left the last one.
    """

    count: int
    over: dict[int, int] = field(default_factory=dict)
    """When the last stage was done with a step."""
    begun: list[dict[int, int]] = field(default_factory=list)
    """Of each stage: when it began a step."""

    def __post_init__(self) -> None:
        self.begun = [{} for _ in range(self.count)]

    def run(self, plan: StepPlan, now: int) -> None:
        distances = plan.scheduled.source_step_distances
        sources = [self.over[plan.step_id - distance] for distance in distances if distance]
        ready = max([now, *sources])
        for begun in self.begun:
            begun[plan.step_id] = ready = max(ready, begun.get(plan.step_id - 1, -1) + 1)
            ready += 1
        self.over[plan.step_id] = ready

    def at_work(self, tick: int) -> int:
        """How many stages work at a tick."""
        return sum(tick in begun.values() for begun in self.begun)


def sampled(plan: StepPlan) -> dict[int, int]:
    """A token for each row that reached its end: each prompt takes one chunk."""
    return dict.fromkeys(plan.scheduled.rows, 1)


@dataclass
class Run:
    """Plans as the control plane makes them, on a worker of stages; an answer takes some ticks."""

    scheduler: Scheduler
    stages: Stages
    answer_ticks: int = 0
    sent: deque[StepPlan] = field(default_factory=deque)
    now: int = 0
    sizes: list[int] = field(default_factory=list)
    """Rows of each plan."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """For each row, when its tokens were sampled."""

    def until(self, end: int) -> None:
        while self.now < end:
            while (plan := self.scheduler.schedule(0.0)) is not None:
                self.stages.run(plan, self.now)
                self.sent.append(plan)
                self.sizes.append(len(plan.scheduled.rows))
            plan = self.sent.popleft()
            over = self.stages.over[plan.step_id]
            self.now = over + self.answer_ticks
            for row in sampled(plan):
                self.tokens.setdefault(row, []).append(over)
            self.scheduler.update(result(plan, sampled(plan)))
            invariants.check(self.scheduler)


def crowd(rows: int, stages: int, *, inflight: int) -> Scheduler:
    """So many sequences that decode for long, with a worker of so many stages."""
    blocks = rows * (LONG // 4 + 2)
    limits = config(
        rows=rows, budget=256, longest=LONG, blocks=blocks, inflight=inflight, stages=stages
    )
    scheduler = scheduler_of(limits)
    for index in range(rows):
        prompt = [index + 10] * PROMPT
        add(scheduler, request(f"r{index}", prompt, max_tokens=LONG, arrival=float(index)))
    return scheduler


@pytest.mark.parametrize("answer_ticks", [0, 1])
@pytest.mark.parametrize("stage_count", [2, 3, 4])
@pytest.mark.parametrize("rows", range(1, 13))
def test_no_row_waits_for_others_and_no_stage_for_rows(
    rows: int, stage_count: int, answer_ticks: int
) -> None:
    """Each row gets a token whenever one has passed all stages, which is as often as it can; and
    where there are rows for all, every stage works all the time."""
    scheduler = crowd(rows, stage_count, inflight=stage_count + 1)
    run = Run(scheduler, Stages(stage_count), answer_ticks)
    run.until(end := ROUNDS * stage_count)
    settled = range(6 * stage_count, end - 2 * stage_count)
    assert len(run.tokens) == rows
    for times in run.tokens.values():
        own = [time for time in times if time in settled]
        assert {later - time for time, later in pairwise(own)} == {stage_count}
    at_work = {run.stages.at_work(tick) for tick in settled}
    if rows % stage_count == 0:
        assert at_work == {stage_count}
    assert min(at_work) >= min(rows, stage_count) // 2


@pytest.mark.parametrize("stage_count", [2, 3, 4])
def test_without_turns_one_stage_works_at_a_time(stage_count: int) -> None:
    """What a controller that does not know of stages gets of the same worker."""
    run = Run(crowd(8, 1, inflight=2), Stages(stage_count))
    run.until(end := ROUNDS * stage_count)
    settled = range(6 * stage_count, end - 2 * stage_count)
    assert {run.stages.at_work(tick) for tick in settled} == {1}


@pytest.mark.parametrize("stage_count", [2, 3, 5])
@pytest.mark.parametrize("rows", [2, 3, 4, 5, 7, 8, 11, 16])
def test_parts_are_equal_and_stay_so_while_rows_come_and_go(rows: int, stage_count: int) -> None:
    scheduler = crowd(rows, stage_count, inflight=stage_count + 1)
    run = Run(scheduler, Stages(stage_count))
    run.until(6 * stage_count)
    for index in range(0, rows, 3):
        scheduler.finish(named(f"r{index}"), FinishReason.CANCELLED)
    for index in range(rows // 2):
        add(scheduler, request(f"n{index}", [index + 100], max_tokens=LONG, arrival=99.0 + index))
    run.until(run.now + 2 * stage_count)
    run.sizes.clear()
    run.until(run.now + 6 * stage_count)
    alive = len(scheduler.ledger.running)
    assert len(run.sizes) >= 5 * min(stage_count, alive)
    assert max(run.sizes) == -(-alive // min(stage_count, alive))


@pytest.mark.parametrize("stage_count", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_nobody_is_in_more_than_two_steps(rows: int, stage_count: int) -> None:
    """What lies behind the step at which a row ends is for nothing, and holds up who comes next."""
    scheduler = crowd(rows, stage_count, inflight=stage_count + 1)
    scheduler.update(result(first := planned(scheduler), sampled(first)))
    steps = 0
    while (plan := scheduler.schedule(0.0)) is not None:
        assert plan.scheduled.rows
        steps += 1
    assert steps == min(stage_count + 1, 2 * rows)
    assert all(sequence.pending <= 2 for sequence in scheduler.ledger.running)


def test_turns_go_around_however_late_plans_are_made() -> None:
    """Nobody starves where every answer is there before the next plan."""
    scheduler = crowd(5, 3, inflight=4)
    last_step = dict.fromkeys(range(5), 1)
    scheduler.update(result(first := planned(scheduler), sampled(first)))
    for _ in range(40):
        plan = planned(scheduler)
        scheduler.update(result(plan, sampled(plan)))
        assert 1 <= len(plan.scheduled.rows) <= 2
        for row in plan.scheduled.rows:
            last_step[row] = plan.step_id
        assert plan.step_id - min(last_step.values()) <= 3


def test_a_long_prompt_streams_through_the_stages_beside_those_who_decode() -> None:
    """Chunks need no token, so each step has one; who decodes comes in turns."""
    limits = config(rows=5, budget=8, longest=64, blocks=100, inflight=3, stages=2)
    scheduler = scheduler_of(limits)
    for index in range(4):
        add(scheduler, request(f"r{index}", [index], max_tokens=50, arrival=float(index)))
    scheduler.update(result(first := planned(scheduler), sampled(first)))
    add(scheduler, request("long", list(range(40)), arrival=9.0))
    plans = [planned(scheduler) for _ in range(3)]
    assert [plan.scheduled.rows for plan in plans] == [[0, 1, 4], [2, 3, 4], [0, 1, 4]]
    assert [plan.scheduled.token_counts[2] for plan in plans] == [6, 6, 6]


def test_who_has_no_room_in_its_turn_holds_up_nobody() -> None:
    """The last in rank needs a block first, all are taken, and nobody ranks behind it: the others
    go on, who have room."""
    limits = config(rows=3, budget=16, longest=8, blocks=7, block_size=2, inflight=2, stages=2)
    scheduler = scheduler_of(limits)
    for index, prompt in enumerate(([1], [2], [3, 3, 3])):
        add(scheduler, request(f"r{index}", prompt, max_tokens=5, arrival=float(index)))
    rows = []
    while scheduler.has_work:
        plan = planned(scheduler)
        rows.append(plan.scheduled.rows)
        scheduler.update(result(plan, sampled(plan)))
        invariants.check(scheduler)
    assert rows[:5] == [[0, 1, 2], [0, 1], [2], [0, 1], [0, 1]]
