"""Rows that verify drafts get the tokens they would get without, whatever is still in flight."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quick import examples
from tests.support.simulated_tokens import expected_tokens
from tests.support.worker_rig import simulated_runner
from worker_service.domain.capability import Feature, Limits
from worker_service.domain.columns import IntColumn
from worker_service.domain.errors import PlanInvalid, PlanMismatch
from worker_service.domain.plan import (
    AddedSequence,
    OutputKind,
    ScheduledRows,
    StepPlan,
    StepResult,
    WeightVersion,
)
from worker_service.domain.sampling import SamplingParameters
from worker_service.simulated.runner import SimulatedModel, SimulatedRunner

LENGTH, BLOCK, ROWS = 160, 4, 4
MODEL = SimulatedModel(
    "drafting",
    vocabulary_size=23,
    limits=Limits(ROWS, 512, LENGTH, LENGTH),
    block_count=1 + ROWS * LENGTH // BLOCK,
    block_size=BLOCK,
)
GREEDY = SamplingParameters(0.0)
SEEDED = SamplingParameters(1.0, seed=11)


def column(values: Iterable[int]) -> IntColumn:
    return np.array(list(values), dtype=np.int32)


@dataclass(slots=True, eq=False)
class Row:
    """A row as its controller knows it: `computed` by the results that were read."""

    prompt: list[int]
    sampling: SamplingParameters
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    planned: int = 0
    """Computed once every plan made has run, if no draft is accepted."""
    sampled_step: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)


@dataclass(slots=True, eq=False)
class Controller:
    """Keeps up to `depth` plans in flight, and reads the oldest result only then."""

    runner: SimulatedRunner
    rows: list[Row]
    depth: int
    rng: random.Random
    first_token: int = 0
    step_id: int = 0
    flight: list[tuple[StepPlan, StepResult]] = field(default_factory=list)
    accepted: int = 0
    rejected: int = 0

    def plan(self, chunk: int, most_drafts: int, literal: bool, fewest: int = 0) -> StepPlan:
        self.step_id += 1
        fields: dict[str, list[int]] = {
            name: []
            for name in (
                "rows", "start_positions", "token_counts", "source_step_distances",
                "literal_token_counts", "appended_block_counts", "draft_counts",
                "literal_draft_counts", "literal_drafts", "open_step_distances",
            )
        }  # fmt: skip
        oldest = self.flight[0][0].step_id if self.flight else self.step_id
        for number, row in enumerate(self.rows):
            prompt_left = len(row.prompt) - row.planned
            count, source, drafts = min(chunk, prompt_left), 0, 0
            if prompt_left <= 0:
                count, source = 1, self.step_id - row.sampled_step
            if prompt_left <= count:
                drafts = self.rng.randint(fewest, most_drafts)
                row.sampled_step = self.step_id
            given = drafts if literal and self.rng.random() < 0.5 else 0
            fields["rows"].append(number)
            fields["start_positions"].append(row.planned)
            fields["token_counts"].append(count + drafts)
            fields["source_step_distances"].append(source)
            fields["literal_token_counts"].append(0)
            fields["appended_block_counts"].append(0)
            fields["draft_counts"].append(drafts)
            fields["literal_draft_counts"].append(given)
            fields["literal_drafts"] += self.guesses(row, row.planned + count, given)
            fields["open_step_distances"].append(self.step_id - oldest)
            row.planned += count
        added = [
            AddedSequence(
                number,
                column(row.prompt),
                len(row.prompt),
                row.sampling,
                OutputKind.SAMPLE,
                column(range(1 + number * LENGTH // BLOCK, 1 + (number + 1) * LENGTH // BLOCK)),
                0,
            )
            for number, row in enumerate(self.rows)
        ]
        return StepPlan(
            1,
            self.step_id,
            self.runner.capability().weight_version,
            column(()),
            tuple(added if self.step_id == 1 else ()),
            ScheduledRows(**{name: column(values) for name, values in fields.items()}),
            bytes,
        )

    def guesses(self, row: Row, position: int, count: int) -> list[int]:
        """Right ones if the row is where it was planned, until one of them is wrong."""
        ahead = position + count - len(row.prompt)
        right = expected_tokens(
            row.prompt, ahead, row.sampling, MODEL.vocabulary_size, self.first_token
        )
        tokens = right[position - len(row.prompt) :]
        return [(token + (self.rng.random() < 0.3)) % MODEL.vocabulary_size for token in tokens]

    def step(self, chunk: int, most_drafts: int, literal: bool, fewest: int = 0) -> None:
        plan = self.plan(chunk, most_drafts, literal, fewest)
        self.flight.append((plan, self.runner.launch(plan).result()))
        if len(self.flight) >= self.depth:
            self.read()

    def read(self) -> None:
        plan, result = self.flight.pop(0)
        flat = iter(result.tokens.tolist())
        for number, count in zip(result.rows.tolist(), result.token_counts.tolist(), strict=True):
            row = self.rows[number]
            row.tokens += [next(flat) for _ in range(count)]
            row.planned += count - 1
            self.accepted += count - 1
            self.rejected += int(plan.scheduled.draft_counts[number]) - (count - 1)
        assert next(flat, None) is None


@settings(deadline=None, max_examples=examples(60))
@given(
    prompts=st.lists(st.lists(st.integers(0, 22), min_size=1, max_size=20), min_size=1, max_size=4),
    chunk=st.integers(1, 21),
    most_drafts=st.integers(0, 4),
    depth=st.integers(1, 4),
    literal=st.booleans(),
    seed=st.integers(0, 2**32),
    first_token=st.sampled_from([0, 9, 22]),
)
def test_tokens_are_those_without_drafts(
    prompts: list[list[int]],
    chunk: int,
    most_drafts: int,
    depth: int,
    literal: bool,
    seed: int,
    first_token: int,
) -> None:
    rows = [Row(prompt, (GREEDY, SEEDED)[n % 2]) for n, prompt in enumerate(prompts)]
    runner = simulated_runner(model=replace(MODEL, first_token=first_token))
    controller = Controller(runner, rows, depth, random.Random(seed), first_token)
    for _ in range(20 // chunk + 16):
        controller.step(chunk, most_drafts, literal)
    while controller.flight:
        controller.read()
    for row in rows:
        count = len(row.tokens) - len(row.prompt)
        assert count >= 16
        expected = expected_tokens(
            row.prompt, count, row.sampling, MODEL.vocabulary_size, first_token
        )
        assert row.tokens == row.prompt + expected
        assert min(expected) >= first_token


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_some_drafts_are_right_and_some_are_wrong(depth: int, literal: bool) -> None:
    runner = simulated_runner(model=MODEL)
    assert Feature.DRAFT_VERIFICATION in runner.capability().features
    controller = Controller(runner, [Row([1, 2, 3], GREEDY)], depth, random.Random(1))
    for _ in range(25):
        controller.step(3, 4, literal)
    assert controller.accepted > 10
    assert controller.rejected > 10


def one_row(depth: int = 1) -> Controller:
    """A row whose prompt is computed and which accepted some of three drafts in step 2."""
    for first in range(23):
        controller = Controller(
            simulated_runner(model=MODEL), [Row([first, 2, 3], GREEDY)], depth, random.Random(0)
        )
        controller.step(3, 0, False)
        controller.step(3, 3, False, fewest=3)
        in_flight = sum(result.tokens.size for _, result in controller.flight)
        if len(controller.rows[0].tokens) + in_flight == 6:
            return controller
    raise AssertionError("no prompt has its first draft accepted and its second not")


def altered(plan: StepPlan, **changes: list[int]) -> StepPlan:
    columns = {name: column(values) for name, values in changes.items()}
    scheduled = {
        name: columns.get(name, getattr(plan.scheduled, name))
        for name in ScheduledRows.__dataclass_fields__
    }
    return replace(plan, scheduled=ScheduledRows(**scheduled))


def test_a_start_must_be_open_where_it_is_not_known() -> None:
    controller = one_row(depth=2)
    plan = controller.plan(1, 3, False, fewest=3)
    assert plan.scheduled.start_positions.tolist() == [4]
    assert plan.scheduled.open_step_distances.tolist() == [1]
    with pytest.raises(PlanMismatch, match="row 0 starts at 4, its computed count is 5"):
        controller.runner.launch(altered(plan, open_step_distances=[0]))
    with pytest.raises(PlanMismatch, match="row 0 starts at 6, its computed count is 5"):
        controller.runner.launch(altered(plan, start_positions=[5]))
    known = altered(plan, start_positions=[5], open_step_distances=[0])
    assert controller.runner.launch(known).result().rows.tolist() == [0]


def test_a_row_added_anew_has_accepted_nothing() -> None:
    controller = one_row(depth=2)
    plan = controller.plan(1, 3, False, fewest=3)
    again = AddedSequence(0, column([5, 6]), 2, GREEDY, OutputKind.SAMPLE, column(range(1, 20)), 0)
    fresh = StepPlan(
        1,
        plan.step_id,
        plan.weight_version,
        column([0]),
        (again,),
        altered(plan, start_positions=[0], token_counts=[5], source_step_distances=[0]).scheduled,
        bytes,
    )
    result = controller.runner.launch(fresh).result()
    expected = expected_tokens([5, 6], result.tokens.size, GREEDY, MODEL.vocabulary_size)
    assert result.tokens.tolist() == expected


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"draft_counts": [4]}, "plan.scheduled.draft_counts"),
        ({"draft_counts": [-1]}, "plan.scheduled.draft_counts"),
        ({"draft_counts": [1, 1]}, "plan.scheduled.draft_counts"),
        (
            {"literal_draft_counts": [2], "literal_drafts": [1, 2]},
            "plan.scheduled.literal_draft_counts",
        ),
        ({"literal_draft_counts": [3], "literal_drafts": [1]}, "plan.scheduled.literal_drafts"),
        (
            {"literal_draft_counts": [3], "literal_drafts": [1, 2, 23]},
            "plan.scheduled.literal_drafts",
        ),
        ({"open_step_distances": [3]}, "plan.scheduled.open_step_distances"),
        (
            {
                "literal_token_counts": [4],
                "literal_tokens": [1, 1, 1, 1],
                "source_step_distances": [0],
            },
            "plan.scheduled.literal_token_counts",
        ),
    ],
)
def test_malformed_drafts_are_refused_by_name(changes: dict[str, list[int]], path: str) -> None:
    controller = one_row()
    plan = controller.plan(1, 3, False, fewest=3)
    with pytest.raises(PlanInvalid) as raised:
        controller.runner.launch(altered(plan, **changes))
    assert raised.value.field_path == path
    assert controller.runner.launch(plan).result().rows.tolist() == [0]


def test_drafts_must_follow_the_rows_last_token() -> None:
    controller = one_row()
    plan = controller.plan(1, 3, False, fewest=3)
    with pytest.raises(PlanMismatch, match="is scheduled to position 6, its tokens reach to 5"):
        controller.runner.launch(altered(plan, source_step_distances=[0]))


@pytest.mark.parametrize("output", [OutputKind.HOLD, OutputKind.NONE])
def test_only_a_sampled_row_verifies_drafts(output: OutputKind) -> None:
    runner = simulated_runner(model=MODEL)
    added = AddedSequence(0, column([1, 2]), 2, GREEDY, output, column([1, 2]), 0)
    zero = column([0])
    columns = ScheduledRows(
        column([0]), zero, column([4]), zero, zero, column(()), zero, draft_counts=column([2])
    )
    plan = StepPlan(1, 1, WeightVersion(1, ""), column(()), (added,), columns, bytes)
    with pytest.raises(PlanInvalid) as raised:
        runner.launch(plan)
    assert raised.value.field_path == "plan.scheduled.draft_counts"


def test_a_rejected_draft_is_no_token_of_the_row() -> None:
    """A literal token takes its place, and what follows is that token's."""
    controller = one_row()
    plan = controller.plan(1, 3, False, fewest=3)
    other = altered(
        plan,
        token_counts=[1],
        draft_counts=[],
        literal_token_counts=[1],
        literal_tokens=[9],
        source_step_distances=[0],
        open_step_distances=[],
    )
    log = [*controller.rows[0].tokens[:5], 9]
    (token,) = controller.runner.launch(other).result().tokens.tolist()
    assert [token] == expected_tokens(log, 1, GREEDY, MODEL.vocabulary_size)
