"""Rows that verify drafts: exact columns, and what results with several tokens do."""

from __future__ import annotations

import pytest

from control_plane.core import invariants
from control_plane.core.errors import ResultMismatch
from control_plane.core.events import FinishReason, SequenceOutput
from control_plane.core.plan import StepPlan, StepResult
from control_plane.core.request import OutputKind
from control_plane.core.scheduler import Scheduler
from control_plane.core.tokens import Tokens
from tests.support.core_requests import (
    add,
    config,
    name_of,
    planned,
    request,
    result,
    scheduler_of,
    sequence,
    several_result,
    table,
)


def drafted(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    """Per scheduled row: row, tokens in all, drafts among them, distance to its first open step."""
    columns = plan.scheduled
    assert not columns.literal_draft_counts and not columns.literal_drafts
    return list(
        zip(
            columns.rows,
            columns.token_counts,
            columns.draft_counts,
            columns.open_step_distances,
            strict=True,
        )
    )


def updated(scheduler: Scheduler, answer: StepResult) -> list[SequenceOutput]:
    outputs = scheduler.update(answer)
    invariants.check(scheduler)
    return outputs


def decoding(scheduler: Scheduler, prompt: list[int], **rest: int) -> None:
    """A sequence "a" whose prompt is computed and whose first token is 30."""
    add(scheduler, request("a", prompt, **rest))
    updated(scheduler, result(planned(scheduler), {0: 30}))


def test_without_a_drafter_the_columns_are_empty() -> None:
    scheduler = scheduler_of(config())
    decoding(scheduler, [1, 2])
    columns = planned(scheduler).scheduled
    assert columns.draft_counts == columns.open_step_distances == []


def test_a_decoding_row_verifies_drafts_and_a_prompt_does_not() -> None:
    scheduler = scheduler_of(config(drafts=2))
    decoding(scheduler, [1, 2, 3])
    add(scheduler, request("b", [4, 5]))
    plan = planned(scheduler)
    assert drafted(plan) == [(0, 3, 2, 0), (1, 2, 0, 0)]
    assert table(plan) == [(0, 3, 3, 0, [30], [2]), (1, 0, 2, 0, [], [3])]


@pytest.mark.parametrize(("tokens", "start"), [([31], 4), ([31, 32], 5), ([31, 32, 33], 6)])
def test_the_next_start_follows_what_was_accepted(tokens: list[int], start: int) -> None:
    scheduler = scheduler_of(config(drafts=2))
    decoding(scheduler, [1, 2, 3])
    [output] = updated(scheduler, several_result(planned(scheduler), {0: tokens}))
    assert output.tokens.ids == tokens and output.finish is None
    [row] = table(planned(scheduler))
    assert row[:5] == (0, start, 3, 0, tokens[-1:])
    assert scheduler.stats().generated_tokens == 1 + len(tokens)


def test_starts_are_relative_to_open_steps() -> None:
    scheduler = scheduler_of(config(drafts=2, inflight=3))
    decoding(scheduler, [1, 2, 3])
    plans = [planned(scheduler) for _ in range(3)]
    assert [(table(plan)[0][1], drafted(plan)[0][3]) for plan in plans] == [(3, 0), (4, 1), (5, 2)]
    assert [table(plan)[0][3] for plan in plans] == [0, 1, 1], "each goes on from the step before"
    updated(scheduler, several_result(plans[0], {0: [31, 32, 33]}))
    plans.append(planned(scheduler))
    assert (table(plans[3])[0][1], drafted(plans[3])[0][3]) == (8, 2), "two were accepted"
    updated(scheduler, several_result(plans[1], {0: [34]}))
    updated(scheduler, several_result(plans[2], {0: [35, 36]}))
    updated(scheduler, several_result(plans[3], {0: [37]}))
    plan = planned(scheduler)
    assert (table(plan)[0][1], drafted(plan)[0][3]) == (10, 0), "nothing is open: exact"
    assert table(plan)[0][4] == [37]


def test_starts_are_exact_where_open_steps_have_no_drafts() -> None:
    scheduler = scheduler_of(config(drafts=2, inflight=2, budget=1))
    add(scheduler, request("a", [1]))
    updated(scheduler, result(planned(scheduler), {0: 30}))
    plans = [planned(scheduler), planned(scheduler)]
    assert [drafted(plan) for plan in plans] == [[(0, 1, 0, 0)], [(0, 1, 0, 0)]]


def test_blocks_cover_the_furthest_start() -> None:
    scheduler = scheduler_of(config(drafts=3, inflight=2, block_size=2))
    decoding(scheduler, [1, 2])
    first, second = planned(scheduler), planned(scheduler)
    assert len(table(first)[0][5]) == 2, "positions 2 to 5"
    assert len(table(second)[0][5]) == 2, "positions 3 to 9, if all of the first are accepted"
    updated(scheduler, several_result(first, {0: [31]}))
    updated(scheduler, several_result(second, {0: [32]}))
    assert table(planned(scheduler))[0][5] == [], "what was rejected left room"


def test_drafts_shrink_towards_the_end_and_a_row_that_may_be_there_waits() -> None:
    scheduler = scheduler_of(config(drafts=3, inflight=3))
    decoding(scheduler, [1, 2], max_tokens=7)
    first = planned(scheduler)
    assert drafted(first) == [(0, 4, 3, 0)], "positions 2 to 5 of 9 tokens"
    second = planned(scheduler)
    assert drafted(second) == [(0, 2, 1, 1)], "at the furthest 6 and 7: 8 is never computed"
    assert scheduler.schedule(0.0) is None, "it may be complete already"
    updated(scheduler, several_result(first, {0: [31]}))
    third = planned(scheduler)
    assert drafted(third) == [(0, 3, 2, 1)], "it is not: three more at most"
    updated(scheduler, several_result(second, {0: [32, 33]}))
    [output] = updated(scheduler, several_result(third, {0: [34, 35]}))
    assert output.finish is None
    last = planned(scheduler)
    assert drafted(last) == [(0, 1, 0, 0)]
    [output] = updated(scheduler, result(last, {0: 36}))
    assert output.finish is not None and output.finish.reason is FinishReason.LENGTH
    assert output.finish.usage.completion_tokens == 7


@pytest.mark.parametrize(("budget", "counts"), [(2, [1, 1]), (3, [2, 1]), (5, [4, 1]), (7, [4, 3])])
def test_drafts_cost_budget_and_leave_a_token_to_everybody_behind(
    budget: int, counts: list[int]
) -> None:
    scheduler = scheduler_of(config(drafts=3, budget=budget))
    for name in ("a", "b"):
        add(scheduler, request(name, [1]))
    updated(scheduler, result(planned(scheduler), {0: 30, 1: 30}))
    assert planned(scheduler).scheduled.token_counts == counts


def test_drafts_take_free_blocks_only_and_leave_one_to_each_behind() -> None:
    scheduler = scheduler_of(config(drafts=3, blocks=5, block_size=2, longest=8))
    for number, name in enumerate(("a", "b")):
        add(scheduler, request(name, [1], arrival=float(number)))
    updated(scheduler, result(planned(scheduler), {0: 30, 1: 30}))
    plan = planned(scheduler)
    assert drafted(plan) == [(0, 3, 2, 0), (1, 3, 2, 0)], "a leaves b the second of two blocks"
    assert scheduler.stats().preemptions == 0
    invariants.check(scheduler)


def test_a_constrained_row_has_no_drafts() -> None:
    scheduler = scheduler_of(config(drafts=3))
    add(scheduler, request("h", [1, 2], output=OutputKind.HOLD))
    scheduler.sample(sequence("h"), None)
    planned(scheduler)
    assert scheduler.next_message(0.0) is not None
    assert drafted(planned_after_answers(scheduler)) == [(0, 1, 0, 0)]


def planned_after_answers(scheduler: Scheduler) -> StepPlan:
    """The plan behind a held step and its sampling, which brings token 5."""
    step, sample = scheduler.ledger.inflight
    scheduler.update(StepResult(7, step.step_id, [], [], Tokens([]), [sample.rows[0]]))
    scheduler.update(StepResult(7, sample.step_id, sample.rows, [1], Tokens([5])))
    return planned(scheduler)


def test_tokens_are_cut_at_the_first_end_and_not_counted_beyond() -> None:
    cases: list[tuple[list[int], list[int], FinishReason, int | None]] = [
        ([31, 9, 32], [31, 9], FinishReason.STOP, 9),
        ([31, 8, 9], [31, 8], FinishReason.STOP, None),
        ([31, 32, 33, 34], [31, 32, 33], FinishReason.LENGTH, None),
        ([31, 32, 9], [31, 32, 9], FinishReason.STOP, 9),
    ]
    for tokens, kept, reason, stop_token in cases:
        scheduler = scheduler_of(config(drafts=3))
        asked = request("a", [1, 2], max_tokens=4, stops=frozenset({9}), ends=frozenset({8}))
        add(scheduler, asked)
        updated(scheduler, result(planned(scheduler), {0: 30}))
        plan = planned(scheduler)
        allowed = plan.scheduled.draft_counts[0] + 1
        [output] = updated(scheduler, several_result(plan, {0: tokens[:allowed]}))
        assert output.tokens.ids == kept
        assert output.finish is not None
        assert (output.finish.reason, output.finish.stop_token_id) == (reason, stop_token)
        assert output.finish.usage.completion_tokens == 1 + len(kept)
        assert scheduler.stats().generated_tokens == 1 + len(kept)


@pytest.mark.parametrize("tokens", [{0: []}, {0: [1, 2, 3, 4]}, {0: [1], 1: [2, 3]}, {0: [1]}])
def test_a_row_gets_a_token_and_no_more_than_it_verified(tokens: dict[int, list[int]]) -> None:
    scheduler = scheduler_of(config(drafts=2))
    decoding(scheduler, [1, 2])
    add(scheduler, request("b", [3, 4]))
    plan = planned(scheduler)
    with pytest.raises(ResultMismatch):
        scheduler.update(several_result(plan, tokens))
    outputs = updated(scheduler, several_result(plan, {0: [1, 2, 3], 1: [4]}))
    assert [name_of(output) for output in outputs] == ["a", "b"]


def test_a_preempted_row_takes_all_tokens_in_flight() -> None:
    scheduler = scheduler_of(config(drafts=1, inflight=3, blocks=5, block_size=2, longest=8))
    add(scheduler, request("a", [1, 2, 3]))
    add(scheduler, request("b", [7], arrival=1.0))
    updated(scheduler, result(planned(scheduler), {0: 30, 1: 40}))
    plans = [planned(scheduler), planned(scheduler)]
    assert drafted(plans[0]) == [(0, 1, 0, 0), (1, 2, 1, 0)]
    assert plans[1].removed_rows == [1], "a needs a block of b's"
    outputs = updated(scheduler, several_result(plans[0], {0: [31], 1: [41, 42]}))
    assert [output.tokens.ids for output in outputs] == [[31], [41, 42]]
    updated(scheduler, several_result(plans[1], {0: [32]}))
    assert list(scheduler.ledger.sequences[sequence("b")].token_ids) == [7, 40, 41, 42]


def test_generated_tokens_are_cached_while_their_request_still_runs() -> None:
    scheduler = scheduler_of(config(drafts=3, block_size=2))
    decoding(scheduler, [1, 2])
    updated(scheduler, several_result(planned(scheduler), {0: [31, 32, 33, 34]}))
    add(scheduler, request("b", [1, 2, 30, 31, 32, 33, 34, 9]))
    plan = planned(scheduler)  # grows a, and with that offers its blocks
    assert table(plan)[0][5] and plan.added[0].computed_token_count == 6


def test_full_blocks_of_accepted_drafts_are_cached() -> None:
    scheduler = scheduler_of(config(drafts=3, block_size=2))
    decoding(scheduler, [1, 2], max_tokens=6)
    updated(scheduler, several_result(planned(scheduler), {0: [31, 32, 33, 34]}))
    updated(scheduler, result(planned(scheduler), {0: 35}))
    add(scheduler, request("b", [1, 2, 30, 31, 32, 33, 34, 9]))
    [added] = planned(scheduler).added
    assert added.computed_token_count == 6
