"""The persistent batch: what plans do to it, and that a refused plan does nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.support.runner_rig import GREEDY, column
from worker_service.domain.capability import Limits
from worker_service.domain.errors import PlanInvalid, PlanMismatch
from worker_service.domain.plan import (
    AddedSequence,
    OutputKind,
    ScheduledRows,
    StepPlan,
    WeightVersion,
)
from worker_service.domain.sampling import SamplingParameters
from worker_service.runner.input_batch import prepare
from worker_service.runner.request_state import RequestState

LIMITS = Limits(
    max_sequence_count=4,
    max_step_token_count=16,
    max_sequence_token_count=20,
    max_prompt_token_count=20,
)


def added(
    row: int,
    tokens: Sequence[int],
    blocks: Sequence[int] = (),
    computed: int = 0,
    sampling: SamplingParameters = GREEDY,
    output: OutputKind = OutputKind.SAMPLE,
) -> AddedSequence:
    return AddedSequence(
        row, column(tokens), len(tokens), sampling, output, column(blocks), computed
    )


def scheduled(rows: Sequence[int] = (), **columns: Sequence[int]) -> ScheduledRows:
    """Columns by name; counts default to one, the rest to zero or nothing."""
    defaults: dict[str, Sequence[int]] = {
        "start_positions": [0] * len(rows),
        "token_counts": [1] * len(rows),
        "source_step_distances": [0] * len(rows),
        "literal_token_counts": [0] * len(rows),
        "literal_tokens": [],
        "appended_block_counts": [0] * len(rows),
        "appended_blocks": [],
    }
    return ScheduledRows(
        column(rows), **{name: column(columns.get(name, defaults[name])) for name in defaults}
    )


def plan(
    step_id: int = 1,
    add: Sequence[AddedSequence] = (),
    remove: Sequence[int] = (),
    run: ScheduledRows | None = None,
) -> StepPlan:
    return StepPlan(
        1,
        step_id,
        WeightVersion(1, ""),
        column(remove),
        tuple(add),
        run or scheduled(),
        bytes,
    )


@pytest.fixture
def state() -> RequestState:
    """Row 1 holds five tokens in blocks 3 and 7, all computed, and sampled token 42 in step 1."""
    state = RequestState(LIMITS, block_count=12, block_size=4, vocabulary_size=50)
    first = plan(
        add=[added(1, [10, 11, 12, 13, 14], [3])],
        run=scheduled([1], token_counts=[5], appended_block_counts=[1], appended_blocks=[7]),
    )
    state.apply(first)
    state.advance(first.scheduled)
    state.record_sampled(column([1]), column([42]), 1)
    return state


def snapshot(state: RequestState) -> dict[str, Any]:
    return {
        name: value.copy() for name, value in vars(state).items() if isinstance(value, np.ndarray)
    }


def interesting_rows(state: RequestState, applied: StepPlan) -> list[int]:
    return prepare(applied, state)[1].rows.tolist()


def test_a_plan_fills_the_columns(state: RequestState) -> None:
    assert state.active.tolist() == [False, True, False, False]
    assert state.token_ids[1, :5].tolist() == [10, 11, 12, 13, 14]
    assert state.block_tables[1].tolist() == [3, 7, 0, 0, 0]
    assert (state.known_counts[1], state.computed_counts[1], state.block_counts[1]) == (5, 5, 2)
    assert state.used_block_count() == 2


def test_a_sampled_token_enters_only_by_a_later_plan(state: RequestState) -> None:
    assert state.known_counts[1] == 5
    later = plan(2, run=scheduled([1], start_positions=[5], source_step_distances=[1]))
    state.apply(later)
    assert state.known_counts[1] == 6
    assert state.token_ids[1, 5] == 42
    assert state.computed_counts[1] == 5
    state.advance(later.scheduled)
    assert state.computed_counts[1] == 6


def test_literal_tokens_become_the_rows(state: RequestState) -> None:
    later = plan(
        9,
        run=scheduled(
            [1],
            start_positions=[5],
            token_counts=[2],
            literal_token_counts=[2],
            literal_tokens=[20, 21],
        ),
    )
    state.apply(later)
    assert state.token_ids[1, :7].tolist() == [10, 11, 12, 13, 14, 20, 21]
    assert state.known_counts[1] == 7
    assert interesting_rows(state, later) == [1]


def test_rows_are_sampled_when_they_reach_their_end(state: RequestState) -> None:
    run = scheduled([2, 3], token_counts=[3, 4], start_positions=[0, 0])
    both = plan(2, add=[added(2, [1] * 4, [1]), added(3, [1] * 4, [2])], run=run)
    state.apply(both)
    assert interesting_rows(state, both) == [3]
    unwanted = plan(
        3,
        remove=[2, 3],
        add=[added(2, [1] * 4, [1]), added(3, [1] * 4, [2], output=OutputKind.NONE)],
        run=run,
    )
    state.apply(unwanted)
    assert interesting_rows(state, unwanted) == []


def test_a_row_may_be_removed_and_taken_in_one_plan(state: RequestState) -> None:
    state.apply(plan(2, remove=[1], add=[added(1, [5], [9])]))
    assert state.token_ids[1, 0] == 5
    assert state.block_tables[1].tolist() == [9, 0, 0, 0, 0]
    assert (state.known_counts[1], state.computed_counts[1], state.sampled_steps[1]) == (1, 0, 0)


def test_shared_blocks_are_counted_once(state: RequestState) -> None:
    state.apply(plan(2, add=[added(0, [1] * 6, [3, 8], computed=4)]))
    assert state.used_block_count() == 3


def test_reset_removes_every_row(state: RequestState) -> None:
    state.reset()
    assert not state.active.any()
    assert state.used_block_count() == 0
    state.apply(plan(1, add=[added(1, [1], [3])]))


def test_step_ids_outlast_32_bits(state: RequestState) -> None:
    step = 2**40
    state.record_sampled(column([1]), column([33]), step)
    run = scheduled([1], start_positions=[5], source_step_distances=[2])
    with pytest.raises(PlanMismatch, match=f"its last is of step {step}"):
        state.apply(plan(step + 1, run=run))
    state.apply(plan(step + 2, run=run))
    assert state.token_ids[1, 5] == 33


INVALID: dict[str, tuple[StepPlan, str]] = {
    "row-twice-removed": (plan(remove=[1, 1]), "plan.removed_rows"),
    "row-out-of-range": (plan(remove=[4]), "plan.removed_rows"),
    "added-row-out-of-range": (plan(add=[added(4, [1])]), "plan.added[0].row"),
    "added-row-negative": (plan(add=[added(-1, [1])]), "plan.added[0].row"),
    "no-tokens": (plan(add=[added(0, [])]), "plan.added[0].token_ids"),
    "too-many-tokens": (plan(add=[added(0, [1] * 21)]), "plan.added[0].token_ids"),
    "unknown-token": (plan(add=[added(0, [50])]), "plan.added[0].token_ids"),
    "negative-token": (plan(add=[added(0, [-1])]), "plan.added[0].token_ids"),
    "null-block": (plan(add=[added(0, [1], [0])]), "plan.added[0].block_ids"),
    "unknown-block": (plan(add=[added(0, [1], [12])]), "plan.added[0].block_ids"),
    "too-many-blocks": (plan(add=[added(0, [1], range(1, 7))]), "plan.added[0].block_ids"),
    "all-computed": (
        plan(add=[added(0, [1, 2], [1], computed=2)]),
        "plan.added[0].computed_token_count",
    ),
    "computed-past-blocks": (
        plan(add=[added(0, [1] * 6, [1], computed=5)]),
        "plan.added[0].computed_token_count",
    ),
    "second-added": (plan(add=[added(0, [1]), added(2, [])]), "plan.added[1].token_ids"),
    "scheduled-twice": (
        plan(run=scheduled([1, 1], start_positions=[5, 5])),
        "plan.scheduled.rows",
    ),
    "scheduled-out-of-range": (plan(run=scheduled([7])), "plan.scheduled.rows"),
    "column-too-short": (
        plan(run=scheduled([1], start_positions=[])),
        "plan.scheduled.start_positions",
    ),
    "columns-without-rows": (plan(run=scheduled(token_counts=[1])), "plan.scheduled.token_counts"),
    "blocks-without-rows": (
        plan(run=scheduled(appended_blocks=[1])),
        "plan.scheduled.appended_blocks",
    ),
    "negative": (plan(run=scheduled([1], start_positions=[-5])), "plan.scheduled.start_positions"),
    "no-count": (
        plan(run=scheduled([1], start_positions=[5], token_counts=[0])),
        "plan.scheduled.token_counts",
    ),
    "too-many-in-step": (
        plan(run=scheduled([1], start_positions=[5], token_counts=[17])),
        "plan.scheduled.token_counts",
    ),
    "past-the-longest": (
        plan(run=scheduled([1], start_positions=[5], token_counts=[16])),
        "plan.scheduled.token_counts",
    ),
    "literal-count": (
        plan(
            run=scheduled(
                [1],
                start_positions=[5],
                token_counts=[2],
                literal_token_counts=[1],
                literal_tokens=[1],
            )
        ),
        "plan.scheduled.literal_token_counts",
    ),
    "literal-missing": (
        plan(run=scheduled([1], start_positions=[5], literal_token_counts=[1])),
        "plan.scheduled.literal_tokens",
    ),
    "literal-unknown": (
        plan(
            run=scheduled([1], start_positions=[5], literal_token_counts=[1], literal_tokens=[50])
        ),
        "plan.scheduled.literal_tokens",
    ),
    "literal-and-step": (
        plan(
            2,
            run=scheduled(
                [1],
                start_positions=[5],
                literal_token_counts=[1],
                literal_tokens=[4],
                source_step_distances=[1],
            ),
        ),
        "plan.scheduled.source_step_distances",
    ),
    "before-the-first-step": (
        plan(2, run=scheduled([1], start_positions=[5], source_step_distances=[2])),
        "plan.scheduled.source_step_distances",
    ),
    "appended-unknown": (
        plan(
            2,
            run=scheduled(
                [1],
                start_positions=[5],
                source_step_distances=[1],
                appended_block_counts=[1],
                appended_blocks=[12],
            ),
        ),
        "plan.scheduled.appended_blocks",
    ),
    "appended-too-many": (
        plan(
            2,
            run=scheduled(
                [1],
                start_positions=[5],
                source_step_distances=[1],
                appended_block_counts=[4],
                appended_blocks=[1, 2, 4, 5],
            ),
        ),
        "plan.scheduled.appended_blocks",
    ),
}

MISMATCHED: dict[str, tuple[StepPlan, str]] = {
    "removed-empty": (plan(remove=[0]), "row 0 holds no sequence"),
    "added-taken": (plan(add=[added(1, [1])]), "row 1 is taken"),
    "added-twice": (plan(add=[added(0, [1]), added(0, [1])]), "row 0 is taken"),
    "scheduled-empty": (plan(run=scheduled([0])), "row 0 holds no sequence"),
    "scheduled-removed": (
        plan(remove=[1], run=scheduled([1], start_positions=[5])),
        "row 1 holds no sequence",
    ),
    "wrong-start": (
        plan(2, run=scheduled([1], start_positions=[4], source_step_distances=[1])),
        "starts at 4, its computed count is 5",
    ),
    "other-step": (
        plan(3, run=scheduled([1], start_positions=[5], source_step_distances=[1])),
        "no token of step 2; its last is of step 1",
    ),
    "added-has-no-sampled-token": (
        plan(
            2,
            remove=[1],
            add=[added(1, [1], [1])],
            run=scheduled([1], start_positions=[0], token_counts=[2], source_step_distances=[1]),
        ),
        "its last is of step 0",
    ),
    "past-the-tokens": (
        plan(2, run=scheduled([1], start_positions=[5])),
        "scheduled to position 6, its tokens reach to 5",
    ),
    "step-token-not-last": (
        plan(
            2,
            run=scheduled([1], start_positions=[5], token_counts=[2], source_step_distances=[1]),
        ),
        "scheduled to position 7, its tokens reach to 6",
    ),
    "no-blocks": (
        plan(
            2,
            run=scheduled(
                [1],
                start_positions=[5],
                token_counts=[4],
                literal_token_counts=[4],
                literal_tokens=[1, 2, 3, 4],
            ),
        ),
        "needs blocks for 9 tokens, has 2 blocks",
    ),
}


@pytest.mark.parametrize("name", INVALID)
def test_invalid_plans_name_the_field_and_change_nothing(state: RequestState, name: str) -> None:
    refused, field = INVALID[name]
    before = snapshot(state)
    with pytest.raises(PlanInvalid) as raised:
        state.apply(refused)
    assert raised.value.field_path == field
    for column_name, value in snapshot(state).items():
        np.testing.assert_array_equal(value, before[column_name], err_msg=column_name)


@pytest.mark.parametrize("name", MISMATCHED)
def test_plans_from_another_state_are_refused_whole(state: RequestState, name: str) -> None:
    refused, words = MISMATCHED[name]
    before = snapshot(state)
    with pytest.raises(PlanMismatch, match=words):
        state.apply(refused)
    for column_name, value in snapshot(state).items():
        np.testing.assert_array_equal(value, before[column_name], err_msg=column_name)
