"""Events in, exact plan columns out."""

from __future__ import annotations

from array import array

import pytest

from control_plane.core.events import FinishReason
from control_plane.core.plan import AddedSequence, OutputKind, Row, WeightVersion
from control_plane.core.request import SamplingParams
from tests.support.core_requests import (
    WEIGHTS,
    add,
    config,
    name_of,
    planned,
    request,
    result,
    scheduler_of,
    sequence,
    table,
)

CANCELLED = FinishReason.CANCELLED


def test_nothing_to_do_is_no_plan() -> None:
    scheduler = scheduler_of(config())
    assert scheduler.schedule(0.0) is None
    assert not scheduler.has_work


def test_a_prompt_is_added_whole_and_then_decodes_with_literal_tokens() -> None:
    scheduler = scheduler_of(config(inflight=1))
    add(scheduler, request("a", [5, 6, 7]))
    first = planned(scheduler)
    assert (first.epoch, first.step_id, first.weight_version) == (7, 1, WEIGHTS)
    sampled = (SamplingParams(0.0), 1, OutputKind.SAMPLE)
    assert first.added == [AddedSequence(Row(0), array("I", [5, 6, 7]), 3, *sampled, [], 0)]
    assert table(first) == [(0, 0, 3, 0, [], [1])]
    assert scheduler.schedule(0.0) is None, "one step in flight is all the synchronous mode has"

    [output] = scheduler.update(result(first, {0: 8}))
    assert (name_of(output), output.tokens.ids, output.finish) == ("a", [8], None)
    second = planned(scheduler)
    assert (second.step_id, second.added, second.removed_rows) == (2, [], [])
    assert table(second) == [(0, 3, 1, 0, [8], [])]
    scheduler.update(result(second, {0: 9}))
    assert table(planned(scheduler)) == [(0, 4, 1, 0, [9], [2])], "a new block, for position 4"


def test_plans_ahead_name_tokens_by_the_step_that_samples_them() -> None:
    scheduler = scheduler_of(config(inflight=2))
    add(scheduler, request("a", [5, 6, 7], max_tokens=4))
    plans = [planned(scheduler), planned(scheduler)]
    assert table(plans[1]) == [(0, 3, 1, 1, [], [])]
    assert scheduler.schedule(0.0) is None and scheduler.inflight_count == 2
    scheduler.update(result(plans[0], {0: 8}))
    plans.append(planned(scheduler))
    assert table(plans[2]) == [(0, 4, 1, 1, [], [2])]
    scheduler.update(result(plans[1], {0: 8}))
    plans.append(planned(scheduler))
    assert table(plans[3]) == [(0, 5, 1, 1, [], [])]
    scheduler.update(result(plans[2], {0: 8}))
    assert scheduler.schedule(0.0) is None, "the fourth and last token is in flight already"
    [output] = scheduler.update(result(plans[3], {0: 8}))
    assert output.finish is not None and output.finish.reason is FinishReason.LENGTH


def test_a_row_that_missed_a_step_names_its_source_further_back() -> None:
    scheduler = scheduler_of(config(blocks=4, block_size=2, longest=6, inflight=4))
    add(scheduler, request("a", [1, 2], arrival=0.0))
    add(scheduler, request("b", [7], arrival=1.0))
    for _ in range(2):
        assert len(table(planned(scheduler))) == 2
    assert table(planned(scheduler)) == [(0, 3, 1, 1, [], [])], "no block is left for b"
    scheduler.finish(sequence("a"), CANCELLED)
    plan = planned(scheduler)
    assert plan.removed_rows == [0]
    assert [(row, start, distance) for row, start, _, distance, *_ in table(plan)] == [(1, 2, 2)]


def test_a_row_is_added_again_in_the_plan_that_removes_it() -> None:
    scheduler = scheduler_of(config(inflight=3, budget=2))
    add(scheduler, request("a", [1]))
    add(scheduler, request("b", [2]))
    planned(scheduler)
    # An urgent long prompt has to wait while the budget goes to those that run.
    add(scheduler, request("c", [3] * 9, priority=-5))
    assert table(planned(scheduler)) == [(0, 1, 1, 1, [], []), (1, 1, 1, 1, [], [])]
    scheduler.finish(sequence("a"), CANCELLED)
    plan = planned(scheduler)
    assert table(plan) == [(1, 2, 1, 1, [], []), (0, 0, 1, 0, [], [1])]
    assert (plan.removed_rows, [added.row for added in plan.added]) == ([0], [0])


def test_a_long_prompt_is_chunked_and_leaves_decodes_their_token() -> None:
    scheduler = scheduler_of(config(budget=6, inflight=1))
    add(scheduler, request("a", [1, 2], priority=1))
    scheduler.update(result(planned(scheduler), {0: 9}))
    add(scheduler, request("b", list(range(12)), priority=-1))
    second = planned(scheduler)
    assert table(second) == [(0, 2, 1, 0, [9], []), (1, 0, 5, 0, [], [2, 3])]
    scheduler.update(result(second, {0: 9}))
    third = planned(scheduler)
    assert table(third) == [(1, 5, 5, 0, [], [4]), (0, 3, 1, 0, [9], [])], "b ranks before a"
    scheduler.update(result(third, {0: 9}))
    fourth = planned(scheduler)
    assert table(fourth) == [(1, 10, 2, 0, [], []), (0, 4, 1, 0, [9], [5])]
    outputs = scheduler.update(result(fourth, {1: 7, 0: 9}))
    assert [name_of(output) for output in outputs] == ["b", "a"]


def test_a_cached_prefix_is_given_as_computed_blocks() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("a", list(range(9)), max_tokens=1))
    [output] = scheduler.update(result(planned(scheduler), {0: 30}))
    assert output.finish is not None and output.finish.usage.cached_prompt_tokens == 0
    add(scheduler, request("b", [*range(8), 20, 21], max_tokens=1))
    plan = planned(scheduler)
    assert plan.removed_rows == [0]
    [added] = plan.added
    assert (added.row, added.block_ids, added.computed_token_count) == (0, [1, 2], 8)
    assert table(plan) == [(0, 8, 2, 0, [], [3])]
    [output] = scheduler.update(result(plan, {0: 30}))
    assert output.finish is not None and output.finish.usage.cached_prompt_tokens == 8
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.cached_prompt_tokens) == (11, 8)


def test_a_prompt_cached_whole_still_computes_its_last_token() -> None:
    scheduler = scheduler_of(config())
    for name in ("a", "b"):
        add(scheduler, request(name, list(range(8)), max_tokens=1))
        plan = planned(scheduler)
        scheduler.update(result(plan, {0: 30}))
    assert plan.added[0].computed_token_count == 4
    assert [(start, count) for _, start, count, *_ in table(plan)] == [(4, 4)]


def test_generated_tokens_are_cached_while_their_request_still_runs() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("a", [1, 2, 3]))
    for token in (4, 5, 6, 7, 8, 9):
        scheduler.update(result(planned(scheduler), {0: token}))
    add(scheduler, request("b", [1, 2, 3, 4, 5, 6, 7, 8, 9]))
    [added] = planned(scheduler).added
    assert (added.block_ids, added.computed_token_count) == ([1, 2], 8)


def test_nothing_is_hit_in_the_plan_that_computes_it() -> None:
    scheduler = scheduler_of(config(inflight=2))
    for name in ("a", "b"):
        add(scheduler, request(name, [1, 2, 3, 4, 5]))
    plan = planned(scheduler)
    assert [added.computed_token_count for added in plan.added] == [0, 0]
    add(scheduler, request("c", [1, 2, 3, 4, 6]))
    [added] = planned(scheduler).added
    assert added.computed_token_count == 4, "the next plan may hit, although no result is back"


def test_salts_do_not_share() -> None:
    scheduler = scheduler_of(config())
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        add(scheduler, request(name, [1, 2, 3, 4, 5], max_tokens=1, salt=salt))
        plan = planned(scheduler)
        cached = plan.added[0].computed_token_count
        assert cached == (4 if name == "c" else 0)
        scheduler.update(result(plan, {0: 9}))


def test_the_last_in_rank_is_preempted_and_resumes_from_the_cache() -> None:
    scheduler = scheduler_of(config(rows=2, blocks=5, block_size=4, longest=16))
    add(scheduler, request("a", [1, 2, 3, 4, 5, 6], max_tokens=6, arrival=0.0))
    add(scheduler, request("b", [7, 8, 9], max_tokens=8, arrival=1.0))
    plan = planned(scheduler)
    assert [added.row for added in plan.added] == [0, 1]
    while not plan.removed_rows:
        rows = dict.fromkeys(plan.scheduled.rows, 40)
        scheduler.update(result(plan, rows))
        plan = planned(scheduler)
    assert plan.removed_rows == [1], "b made room for a"
    assert [row for row, *_ in table(plan)] == [0]
    assert scheduler.stats().preemptions == 1
    while not plan.added:
        scheduler.update(result(plan, dict.fromkeys(plan.scheduled.rows, 40)))
        plan = planned(scheduler)
    [resumed] = plan.added
    assert list(resumed.token_ids[:3]) == [7, 8, 9] and set(resumed.token_ids[3:]) == {40}
    assert resumed.computed_token_count == 4
    assert "preempted" in " ".join(scheduler.story(sequence("b")))


def test_a_preempted_sequence_takes_its_tokens_in_flight_before_it_is_added_again() -> None:
    scheduler = scheduler_of(config(rows=2, blocks=4, block_size=2, longest=6, inflight=3))
    add(scheduler, request("a", [1, 2], max_tokens=4, arrival=0.0))
    add(scheduler, request("b", [7], max_tokens=3, arrival=1.0))
    plans = [planned(scheduler), planned(scheduler), planned(scheduler)]
    assert [row for row, *_ in table(plans[2])] == [0], "no block is left for b, so it waits"
    scheduler.update(result(plans[0], {0: 40, 1: 41}))
    plans.append(planned(scheduler))
    assert plans[3].removed_rows == [1], "a takes b's block"
    outputs = scheduler.update(result(plans[1], {0: 40, 1: 42}))
    assert [(name_of(output), output.tokens.ids) for output in outputs] == [
        ("a", [40]),
        ("b", [42]),
    ]
    for plan in plans[2:]:
        assert scheduler.schedule(0.0) is None
        scheduler.update(result(plan, {0: 40}))
    [added] = planned(scheduler).added
    assert list(added.token_ids) == [7, 41, 42]


def test_urgent_requests_start_first_and_waiting_makes_up_for_priority() -> None:
    scheduler = scheduler_of(config(rows=1))
    add(scheduler, request("old", [1], max_tokens=1, arrival=0.0, priority=1))
    add(scheduler, request("urgent", [2], max_tokens=1, arrival=5.0, priority=0))
    add(scheduler, request("late", [3], max_tokens=1, arrival=11.0, priority=0))
    order = []
    while scheduler.has_work:
        plan = planned(scheduler)
        order += [added.token_ids[0] for added in plan.added]
        scheduler.update(result(plan, dict.fromkeys(plan.scheduled.rows, 9)))
    assert order == [2, 1, 3], "ten seconds are worth one level"


def test_a_stream_of_urgent_requests_starves_nobody() -> None:
    scheduler = scheduler_of(config(rows=1))
    add(scheduler, request("patient", [1], max_tokens=1, arrival=0.0, priority=3))
    for step in range(100):
        add(scheduler, request(f"u{step}", [2], max_tokens=1, arrival=float(step)))
        plan = planned(scheduler, now=float(step))
        outputs = scheduler.update(result(plan, dict.fromkeys(plan.scheduled.rows, 9)))
        if name_of(outputs[0]) == "patient":
            break
    assert step == 30


def test_a_large_request_at_the_head_is_not_passed_by() -> None:
    scheduler = scheduler_of(config(rows=3, blocks=9, budget=64))
    add(scheduler, request("a", [1] * 17, max_tokens=2, arrival=0.0))
    first = planned(scheduler)
    add(scheduler, request("large", [2] * 25, max_tokens=1, arrival=1.0))
    add(scheduler, request("small", [3], max_tokens=1, arrival=2.0))
    scheduler.update(result(first, {0: 9}))
    second = planned(scheduler)
    assert second.added == [], "blocks for the small one are free, but it is not its turn"
    scheduler.update(result(second, {0: 9}))
    third = planned(scheduler)
    assert [len(added.token_ids) for added in third.added] == [25]


def test_a_cancelled_request_frees_at_once_and_its_late_tokens_are_dropped() -> None:
    scheduler = scheduler_of(config(rows=1, inflight=2))
    add(scheduler, request("a", [1, 2, 3]))
    plans = [planned(scheduler), planned(scheduler)]
    finish = scheduler.finish(sequence("a"), CANCELLED)
    assert finish is not None and finish.usage.completion_tokens == 0
    assert scheduler.finish(sequence("a"), CANCELLED) is None
    assert scheduler.stats().kv_active_tokens == 0
    add(scheduler, request("b", [4, 5]))  # the row is free again
    assert scheduler.update(result(plans[0], {0: 8})) == []
    third = planned(scheduler)
    assert third.removed_rows == [0] and third.added[0].row == 0
    assert scheduler.update(result(plans[1], {0: 8})) == []
    [output] = scheduler.update(result(third, {0: 9}))
    assert (name_of(output), output.tokens.ids) == ("b", [9])


def test_an_idle_worker_gives_its_rows_back() -> None:
    scheduler = scheduler_of(config(inflight=2))
    add(scheduler, request("a", [1, 2], max_tokens=1))
    first = planned(scheduler)
    assert scheduler.schedule(0.0) is None
    scheduler.update(result(first, {0: 5}))
    had_work = scheduler.has_work
    last = planned(scheduler)
    assert (last.removed_rows, last.added, table(last)) == ([0], [], [])
    assert scheduler.update(result(last, {})) == []
    assert (had_work, scheduler.has_work) == (True, False)
    assert scheduler.schedule(0.0) is None


def test_resync_starts_everybody_again_with_the_token_log() -> None:
    scheduler = scheduler_of(config(inflight=2))
    add(scheduler, request("a", [1, 2, 3, 4, 5]))
    add(scheduler, request("b", [6], arrival=1.0))
    plans = [planned(scheduler), planned(scheduler)]
    scheduler.update(result(plans[0], {0: 40, 1: 41}))
    assert scheduler.resync(config(inflight=2), 8, WeightVersion(2, "v")) == []
    assert scheduler.inflight_count == 0
    plan = planned(scheduler)
    assert (plan.epoch, plan.step_id, plan.weight_version) == (8, 1, WeightVersion(2, "v"))
    assert plan.removed_rows == []
    assert [list(added.token_ids) for added in plan.added] == [[1, 2, 3, 4, 5, 40], [6, 41]]
    assert [added.computed_token_count for added in plan.added] == [0, 0]


def test_what_is_computed_again_is_counted_apart() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("a", [1, 2, 3, 4, 5]))
    scheduler.update(result(planned(scheduler), {0: 40}))
    scheduler.update(result(planned(scheduler), {0: 41}))
    scheduler.resync(config(), 8, WEIGHTS)
    planned(scheduler)  # five prompt tokens, one generated, and one that never was computed
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.recomputed_tokens) == (5, 6)


def test_after_a_resync_prefixes_are_hashed_anew() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("a", [1, 2, 3, 4, 5, 6, 7]))
    scheduler.update(result(planned(scheduler), {0: 9}))
    scheduler.resync(config(block_size=2), 8, WeightVersion(2, "v"))
    scheduler.update(result(planned(scheduler), {0: 9}))
    add(scheduler, request("b", [1, 2, 3, 4, 5, 6, 0]))
    assert planned(scheduler).added[0].computed_token_count == 6


@pytest.mark.parametrize("length", [8, 10])
def test_resync_ends_what_a_smaller_worker_cannot_hold(length: int) -> None:
    """A sequence that fills it exactly, too: there is no room for another token."""
    scheduler = scheduler_of(config())
    add(scheduler, request("a", [1] * length))
    add(scheduler, request("b", [1] * 3))
    [output] = scheduler.resync(config(longest=8), 8, WEIGHTS)
    assert name_of(output) == "a" and output.finish is not None
    assert output.finish.reason is FinishReason.LENGTH
    assert [len(added.token_ids) for added in planned(scheduler).added] == [3]


@pytest.mark.parametrize(
    ("budget", "rows", "counts"), [(1, 4, [1]), (5, 4, [3, 2]), (16, 1, [3]), (16, 4, [3, 3, 3])]
)
def test_budget_and_rows_bound_a_step(budget: int, rows: int, counts: list[int]) -> None:
    scheduler = scheduler_of(config(budget=budget, rows=rows))
    for name in ("a", "b", "c"):
        add(scheduler, request(name, [1, 2, 3]))
    assert planned(scheduler).scheduled.token_counts == counts
