"""Other weights for a core: what becomes of rows, blocks, ranks and credits, step by step."""

from __future__ import annotations

import pytest

from control_plane.core import invariants
from control_plane.core.events import FinishReason
from control_plane.core.plan import WeightVersion
from control_plane.core.scheduler import Scheduler
from control_plane.core.spans import WeightsSpan, extended, token_count
from control_plane.core.weights import InFlightPolicy
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

NEW = WeightVersion(2, "v", "second")
ABORT, KEEP, CONTINUE, FINISH = (
    InFlightPolicy.ABORT,
    InFlightPolicy.KEEP_KV,
    InFlightPolicy.CONTINUE_ON_NEW,
    InFlightPolicy.FINISH_ON_OLD,
)
PROMPT = list(range(9))


def begun(count: int = 2, **limits: int) -> Scheduler:
    """One runs and has so many tokens, one waits that has none, one waits that has one."""
    scheduler = scheduler_of(config(rows=1, budget=32, **limits))  # type: ignore[arg-type]
    add(scheduler, request("had", PROMPT[:3], max_tokens=5, arrival=1.0))
    scheduler.update(result(planned(scheduler), {0: 20}))
    scheduler.ledger.preempt(scheduler.ledger.sequences[sequence("had")])
    add(scheduler, request("runs", PROMPT, arrival=0.0))
    for token in range(count):
        scheduler.update(result(planned(scheduler), {0: 10 + token}))
    add(scheduler, request("waits", PROMPT, arrival=2.0))
    return scheduler


def switched(scheduler: Scheduler, policy: InFlightPolicy) -> list[str]:
    """Who ended by it."""
    outputs = scheduler.switch_weights(NEW, policy)
    invariants.check(scheduler)
    assert all(one.finish and one.finish.reason is FinishReason.WEIGHTS_CHANGED for one in outputs)
    return [name_of(output) for output in outputs]


def test_who_goes_on_is_added_whole_and_in_order_of_rank() -> None:
    scheduler = begun()
    assert switched(scheduler, CONTINUE) == []
    assert [s.sequence_id for s in scheduler.ledger.waiting] == [
        sequence(name) for name in ("runs", "had", "waits")
    ]
    plan = planned(scheduler)
    assert plan.weight_version == NEW and plan.removed_rows == [0]
    [added] = plan.added
    assert list(added.token_ids) == [*PROMPT, 10, 11] and added.computed_token_count == 0
    scheduler.update(result(plan, {0: 12}))
    finish = scheduler.finish(sequence("runs"), FinishReason.CANCELLED)
    assert finish is not None
    assert finish.spans == (WeightsSpan(2, WEIGHTS.digest), WeightsSpan(1, "v", "second"))


def test_what_is_computed_behind_it_is_found_by_whoever_comes_later() -> None:
    scheduler = begun()
    switched(scheduler, CONTINUE)
    scheduler.update(result(planned(scheduler), {0: 12}))
    scheduler.finish(sequence("runs"), FinishReason.CANCELLED)
    scheduler.finish(sequence("had"), FinishReason.CANCELLED)
    [added] = planned(scheduler).added
    assert added.computed_token_count == 8, "two blocks of the same prompt"
    invariants.check(scheduler)


def test_who_keeps_its_kv_stays_where_it_is() -> None:
    scheduler = begun()
    assert switched(scheduler, KEEP) == []
    plan = planned(scheduler)
    assert plan.weight_version == NEW and not plan.added and not plan.removed_rows
    assert table(plan) == [(0, 10, 1, 0, [11], [])]
    scheduler.update(result(plan, {0: 12}))
    assert len(scheduler.ledger.cache) == 0, "nobody may share it"
    finish = scheduler.finish(sequence("runs"), FinishReason.CANCELLED)
    assert finish is not None and finish.spans == (
        WeightsSpan(2, WEIGHTS.digest),
        WeightsSpan(1, "v", "second", kv_of_other_weights=True),
    )
    plan = planned(scheduler)
    assert plan.added[0].computed_token_count == 0, "nor does anybody"


def test_once_it_is_computed_anew_the_kv_is_of_the_weights() -> None:
    scheduler = begun()
    switched(scheduler, KEEP)
    scheduler.update(result(planned(scheduler), {0: 12}))
    scheduler.ledger.preempt(scheduler.ledger.sequences[sequence("runs")])
    invariants.check(scheduler)
    scheduler.update(result(planned(scheduler), {0: 13}))
    assert len(scheduler.ledger.cache) > 0
    finish = scheduler.finish(sequence("runs"), FinishReason.CANCELLED)
    assert finish is not None and finish.spans == (
        WeightsSpan(2, WEIGHTS.digest),
        WeightsSpan(1, "v", "second", kv_of_other_weights=True),
        WeightsSpan(1, "v", "second"),
    )


def test_those_with_tokens_end_and_the_others_notice_nothing() -> None:
    scheduler = begun()
    assert sorted(switched(scheduler, ABORT)) == ["had", "runs"]
    [added] = planned(scheduler).added
    assert list(added.token_ids) == PROMPT and added.computed_token_count == 0


@pytest.mark.parametrize("policy", list(InFlightPolicy))
def test_a_prompt_that_is_half_computed_starts_over_or_says_so(policy: InFlightPolicy) -> None:
    scheduler = scheduler_of(config(budget=6))
    add(scheduler, request("a", PROMPT, max_tokens=1))
    scheduler.update(result(planned(scheduler), {}))
    if policy is FINISH:
        with pytest.raises(AssertionError, match="not finished"):
            scheduler.switch_weights(NEW, policy)
        return
    assert switched(scheduler, policy) == []
    plan = planned(scheduler)
    if policy is not KEEP:
        assert plan.added[0].computed_token_count == 0
        scheduler.update(result(plan, {}))
        plan = planned(scheduler)
    [output] = scheduler.update(result(plan, {0: 5}))
    assert output.finish is not None
    assert output.finish.spans == (WeightsSpan(1, "v", "second", policy is KEEP),)


def test_nobody_begins_while_it_closes_and_who_has_begun_ends() -> None:
    scheduler = begun(count=1)
    assert scheduler.close() is False
    scheduler.finish(sequence("runs"), FinishReason.CANCELLED)
    assert scheduler.close() is False, "one that waits has a token"
    plan = planned(scheduler)
    assert [list(added.token_ids) for added in plan.added] == [[*PROMPT[:3], 20]]
    for token in range(4):
        scheduler.update(result(plan, {0: 21 + token}))
        if token < 3:
            plan = planned(scheduler)
    last = scheduler.schedule(0.0)
    assert last is not None and not last.scheduled.rows, "the row is given back, and no more"
    scheduler.update(result(last, {}))
    assert scheduler.schedule(0.0) is None and scheduler.close() is True
    assert switched(scheduler, FINISH) == []
    assert [list(added.token_ids) for added in planned(scheduler).added] == [PROMPT]


def test_closing_is_taken_back() -> None:
    scheduler = begun(count=1)
    scheduler.close()
    for name in ("runs", "had"):
        scheduler.finish(sequence(name), FinishReason.CANCELLED)
    assert scheduler.close(is_closing=False) is True
    assert planned(scheduler).added


def test_nothing_may_be_in_flight() -> None:
    scheduler = begun()
    planned(scheduler)
    with pytest.raises(AssertionError, match="mix versions"):
        scheduler.switch_weights(NEW, CONTINUE)


def test_tokens_are_counted_by_their_weights_and_few_are_remembered() -> None:
    scheduler = scheduler_of(config(budget=64))
    add(scheduler, request("a", [1, 2, 3], max_tokens=25))
    for number in range(20):
        scheduler.update(result(planned(scheduler), {0: 5}))
        version = WeightVersion(number + 2, f"{number:064d}", f"v{number}")
        scheduler.switch_weights(version, CONTINUE)
    by_weights = scheduler.stats().generated_by_weights
    assert by_weights == {**{f"v{number}": 1 for number in range(11, 19)}, "v19": 0}


def test_spans_that_are_alike_are_one() -> None:
    one, two = WeightsSpan(2, "a"), WeightsSpan(3, "b")
    assert extended((), WeightsSpan(0, "a")) == ()
    assert extended(extended((one,), one), two) == (WeightsSpan(4, "a"), two)
    assert extended((one,), WeightsSpan(1, "a", "named")) == (one, WeightsSpan(1, "a", "named"))
    assert token_count((one, two)) == 5
