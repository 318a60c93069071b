"""Sequences whose tokens are constrained: held, allowed, sampled; and who goes on meanwhile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core import invariants
from control_plane.core.errors import ResultMismatch
from control_plane.core.events import FinishReason
from control_plane.core.plan import GrammarMasks, Message, Row, RowFault, SamplePlan, StepPlan
from control_plane.core.request import OutputKind
from control_plane.core.scheduler import Scheduler
from tests.support.core_requests import (
    WEIGHTS,
    add,
    config,
    held_result,
    name_of,
    planned,
    request,
    result,
    scheduler_of,
    sequence,
    table,
)

HOLD = OutputKind.HOLD
MASK, OTHER_MASK = b"\x0f\0\0\0", b"\xf0\0\0\0"


def sampled(scheduler: Scheduler) -> SamplePlan:
    """The next message, where it must be a SamplePlan."""
    message = scheduler.next_message(0.0)
    assert isinstance(message, SamplePlan)
    invariants.check(scheduler)
    return message


def stepped(scheduler: Scheduler) -> StepPlan:
    """The next message, where it must be a step."""
    message: Message | None = scheduler.next_message(0.0)
    assert isinstance(message, StepPlan)
    invariants.check(scheduler)
    return message


def test_a_held_row_stands_still_and_those_beside_it_go_on() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("h", [1, 2, 3], output=HOLD))
    add(scheduler, request("s", [4, 5], arrival=1.0))
    first = stepped(scheduler)
    assert [added.output for added in first.added] == [HOLD, OutputKind.SAMPLE]
    [output] = scheduler.update(held_result(first, {1: 9}, [0]))
    assert (name_of(output), output.tokens.ids) == ("s", [9])
    assert table(stepped(scheduler)) == [(1, 2, 1, 0, [9], [])], "only the row that is not held"


def test_a_mask_samples_the_row_before_the_next_step_which_may_name_it() -> None:
    scheduler = scheduler_of(config(inflight=2))
    add(scheduler, request("h", [1, 2, 3], output=HOLD))
    first = stepped(scheduler)
    assert scheduler.next_message(0.0) is None, "nobody else is here"
    scheduler.sample(sequence("h"), MASK)
    sample = sampled(scheduler)
    assert (sample.epoch, sample.step_id, sample.rows) == (7, 1, [0])
    assert sample.masks == GrammarMasks([Row(0)], MASK)
    second = stepped(scheduler)
    assert table(second) == [(0, 3, 1, 1, [], [])], "its token is the one that step 1 samples"
    assert scheduler.inflight_count == 3
    assert scheduler.update(held_result(first, {}, [0])) == []
    [output] = scheduler.update(result(sample, {0: 2}))
    assert output.tokens.ids == [2] and output.finish is None
    assert scheduler.next_message(0.0) is None, "the second is held, and its mask is not known"
    scheduler.update(held_result(second, {}, [0]))
    scheduler.sample(sequence("h"), None)
    again = sampled(scheduler)
    assert (again.step_id, again.masks) == (2, None), "free"
    scheduler.update(result(again, {0: 3}))
    assert table(stepped(scheduler)) == [(0, 4, 1, 0, [3], [2])], "known by now: literally"


def test_rows_of_one_step_are_sampled_together_or_one_by_one() -> None:
    scheduler = scheduler_of(config())
    for number, name in enumerate("abc"):
        add(scheduler, request(name, [1, 2], output=HOLD, arrival=float(number)))
    plan = stepped(scheduler)
    scheduler.update(held_result(plan, {}, [0, 1, 2]))
    scheduler.sample(sequence("c"), MASK)
    late = sampled(scheduler)
    assert late.rows == [2]
    scheduler.sample(sequence("b"), None)
    scheduler.sample(sequence("a"), OTHER_MASK)
    both = sampled(scheduler)
    assert (both.step_id, both.rows) == (late.step_id, [1, 0])
    assert both.masks == GrammarMasks([Row(0)], OTHER_MASK)
    assert [name_of(output) for output in scheduler.update(result(late, {2: 3}))] == ["c"]
    assert [name_of(output) for output in scheduler.update(result(both, {1: 3, 0: 4}))] == [
        "b",
        "a",
    ]


def test_a_mask_that_is_known_before_the_prompt_is_computed_waits_for_its_step() -> None:
    scheduler = scheduler_of(config(budget=4))
    add(scheduler, request("h", [1, 2, 3, 4, 5, 6], output=HOLD))
    scheduler.sample(sequence("h"), MASK)
    scheduler.update(held_result(stepped(scheduler), {}, []))
    second = stepped(scheduler)
    assert sampled(scheduler).step_id == second.step_id == 2


def test_a_mask_is_told_once_for_each_token() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("h", [1, 2], output=HOLD))
    add(scheduler, request("s", [1, 2]))
    scheduler.sample(sequence("h"), MASK)
    for name in ("h", "s"):
        with pytest.raises(AssertionError):
            scheduler.sample(sequence(name), MASK)
    stepped(scheduler)
    sampled(scheduler)
    with pytest.raises(AssertionError):
        scheduler.sample(sequence("h"), MASK)
    scheduler.finish(sequence("h"), FinishReason.CANCELLED)
    scheduler.sample(sequence("h"), MASK)  # late, for what is over: nothing
    invariants.check(scheduler)


def test_a_held_row_faults_when_it_is_sampled() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("h", [1, 2], output=HOLD))
    scheduler.sample(sequence("h"), MASK)
    scheduler.update(held_result(stepped(scheduler), {}, [0]))
    sample = sampled(scheduler)
    fault = RowFault(Row(0), "EMPTY_MASK", "no token")
    [output] = scheduler.update(replace(result(sample, {}), faults=[fault]))
    assert output.finish is not None and output.finish.reason is FinishReason.FAULT
    invariants.check(scheduler)


def test_a_cancelled_held_row_leaves_nothing_behind() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("h", [1, 2], output=HOLD))
    plan = stepped(scheduler)
    scheduler.finish(sequence("h"), FinishReason.CANCELLED)
    assert scheduler.update(held_result(plan, {}, [0])) == []
    assert stepped(scheduler).removed_rows == [0]
    assert scheduler.stats().kv_active_tokens == 0


def test_held_rows_in_the_way_of_everybody_make_room_and_start_again_with_their_mask() -> None:
    scheduler = scheduler_of(config(rows=1))
    add(scheduler, request("h", [1, 2, 3, 4, 5], output=HOLD))
    scheduler.update(held_result(stepped(scheduler), {}, [0]))
    assert scheduler.next_message(0.0) is None, "nobody else wants the row"
    add(scheduler, request("s", [6], max_tokens=1, arrival=1.0))
    plan = stepped(scheduler)
    assert plan.removed_rows == [0] and list(plan.added[0].token_ids) == [6]
    assert scheduler.stats().preemptions == 1 and scheduler.stats().waiting == 1
    scheduler.update(result(plan, {0: 9}))
    last = stepped(scheduler)
    assert last.added == [], "without its mask it would only be held again"
    scheduler.update(result(last, {}))
    scheduler.sample(sequence("h"), MASK)
    [added] = stepped(scheduler).added
    assert (list(added.token_ids), added.computed_token_count) == ([1, 2, 3, 4, 5], 4)
    assert sampled(scheduler).step_id == 4


def test_the_last_of_the_held_makes_room_first() -> None:
    scheduler = scheduler_of(config(rows=2))
    for number, name in enumerate(("h", "i")):
        add(scheduler, request(name, [1, number], output=HOLD, arrival=float(number)))
    scheduler.update(held_result(stepped(scheduler), {}, [0, 1]))
    add(scheduler, request("s", [6], arrival=2.0))
    assert stepped(scheduler).removed_rows == [1]
    assert scheduler.stats().preemptions == 1, "and no more of them than has to"


def test_a_preempted_row_takes_the_token_that_was_being_sampled() -> None:
    scheduler = scheduler_of(config(rows=2, blocks=4, block_size=2, longest=6, inflight=3))
    add(scheduler, request("a", [1, 2], max_tokens=4))
    add(scheduler, request("h", [7, 8], max_tokens=3, arrival=1.0, output=HOLD))
    scheduler.sample(sequence("h"), MASK)
    first = stepped(scheduler)
    sample = sampled(scheduler)
    scheduler.update(held_result(first, {0: 40}, [1]))
    second = stepped(scheduler)
    assert [row for row, *_ in table(second)] == [0], "a takes the last block"
    third = stepped(scheduler)
    assert [row for row, *_ in table(third)] == [0]
    fourth = stepped(scheduler)
    assert fourth.removed_rows == [1], "and then h's"
    [output] = scheduler.update(result(sample, {1: 3}))
    assert (name_of(output), output.tokens.ids) == ("h", [3])


def test_a_row_that_is_preempted_between_its_mask_and_its_sampling_waits_like_any_other() -> None:
    scheduler = scheduler_of(config(blocks=5, block_size=2, longest=8))
    add(scheduler, request("a", [1, 2, 3]))
    add(scheduler, request("h", [7], arrival=1.0, output=HOLD))
    scheduler.update(held_result(stepped(scheduler), {0: 40}, [1]))
    scheduler.sample(sequence("h"), MASK)
    for token in (41, 42, 43):
        scheduler.update(result(planned(scheduler), {0: token}))  # steps only: no mask is sent
    plan = planned(scheduler)
    assert plan.removed_rows == [1] and scheduler.stats().waiting == 1
    invariants.check(scheduler)
    scheduler.finish(sequence("a"), FinishReason.CANCELLED)
    scheduler.update(result(plan, {0: 44}))
    assert list(stepped(scheduler).added[0].token_ids) == [7]
    assert sampled(scheduler).masks == GrammarMasks([Row(0)], MASK)


def test_a_loss_forgets_the_hold_but_not_what_was_allowed() -> None:
    scheduler = scheduler_of(config())
    for number, name in enumerate("ab"):
        add(scheduler, request(name, [1, 2, number], output=HOLD, arrival=float(number)))
    plan = stepped(scheduler)
    scheduler.update(held_result(plan, {}, [0, 1]))
    scheduler.sample(sequence("a"), MASK)
    sampled(scheduler)  # its answer never comes
    assert scheduler.resync(config(), 8, WEIGHTS) == []
    invariants.check(scheduler)
    assert len(stepped(scheduler).added) == 2
    again = sampled(scheduler)
    assert (again.epoch, again.step_id, again.rows) == (8, 1, [0])
    assert again.masks == GrammarMasks([Row(0)], MASK)


@pytest.mark.parametrize(
    ("tokens", "held"),
    [({0: 3}, []), ({1: 3}, [0, 1]), ({1: 3}, []), ({}, [0]), ({0: 3, 1: 3}, [])],
)
def test_a_result_holds_exactly_the_rows_that_were_to_be_held(
    tokens: dict[int, int], held: list[int]
) -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("h", [1, 2], output=HOLD))
    add(scheduler, request("s", [1, 2], arrival=1.0))
    plan = stepped(scheduler)
    with pytest.raises(ResultMismatch) as refused:
        scheduler.update(held_result(plan, tokens, held))
    assert any("started in row 1" in line for line in refused.value.story)
    scheduler.update(held_result(plan, {1: 3}, [0]))
