"""A loss that only broke the connection: what the KV keeps, and what it drops."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core import invariants
from control_plane.core.events import FinishReason
from control_plane.core.plan import StepPlan, WeightVersion
from control_plane.core.scheduler import Scheduler
from tests.support.core_requests import (
    WEIGHTS,
    add,
    config,
    planned,
    request,
    result,
    scheduler_of,
    sequence,
    several_result,
    table,
)


def reconnected(scheduler: Scheduler) -> StepPlan:
    """The first plan after a reconnect that keeps the KV."""
    limits = scheduler.ledger.config
    assert scheduler.resync(limits, 8, WEIGHTS, keep_kv=True) == []
    invariants.check(scheduler)
    plan = planned(scheduler)
    invariants.check(scheduler)
    assert (plan.epoch, plan.step_id, plan.removed_rows) == (8, 1, [])
    return plan


def test_a_running_sequence_goes_on_from_what_answered_steps_computed() -> None:
    scheduler = scheduler_of(config(budget=6))
    add(scheduler, request("a", list(range(14))))
    scheduler.update(result(planned(scheduler), {}))
    planned(scheduler)  # of tokens 6 to 11, and never answered
    plan = reconnected(scheduler)
    [added] = plan.added
    assert (added.computed_token_count, added.block_ids) == (4, [1]), "one full block of six tokens"
    assert table(plan) == [(0, 4, 6, 0, [], [2, 3])]


@pytest.mark.parametrize(("generated", "open_steps"), [(6, 0), (6, 1), (5, 0), (5, 1), (5, 2)])
def test_generated_tokens_are_kept_too(generated: int, open_steps: int) -> None:
    """Of eight known tokens the last was never computed, or by an open step."""
    scheduler = scheduler_of(config(inflight=2))
    add(scheduler, request("a", [1, 2, 3]))
    for token in range(generated):
        scheduler.update(result(planned(scheduler), {0: token}))
    for _ in range(open_steps):
        planned(scheduler)
    known = list(scheduler.ledger.sequences[sequence("a")].token_ids)
    add(scheduler, request("b", [*known[:8], 30], arrival=1.0))
    kept = 8 if generated == 6 else 4
    for _ in range(2):  # and at the next loss
        plan = reconnected(scheduler)
        assert [added.computed_token_count for added in plan.added] == [kept, kept]


def test_what_an_unanswered_step_offered_is_dropped() -> None:
    scheduler = scheduler_of(config(inflight=2))
    add(scheduler, request("a", list(range(9))))
    planned(scheduler)  # offers two blocks
    add(scheduler, request("b", list(range(9))))
    assert planned(scheduler).added[0].computed_token_count == 8, "hits what is on its way"
    plan = reconnected(scheduler)
    assert [added.computed_token_count for added in plan.added] == [0, 0]
    assert scheduler.stats().kv_cached_tokens == 0


def test_what_an_unanswered_step_evicted_is_gone() -> None:
    scheduler = scheduler_of(config(blocks=9, budget=32))
    for name, first in (("a", 0), ("b", 10)):
        add(scheduler, request(name, list(range(first, first + 9)), max_tokens=1))
        scheduler.update(result(planned(scheduler), {0: 30}))
    assert scheduler.stats().kv_cached_tokens == 16
    add(scheduler, request("c", [30] * 24, arrival=1.0))
    planned(scheduler)  # takes four blank blocks and both of a's, and never answers
    scheduler.finish(sequence("c"), FinishReason.CANCELLED)
    for name, first in (("a2", 0), ("b2", 10)):
        add(scheduler, request(name, list(range(first, first + 9)), arrival=2.0))
    plan = reconnected(scheduler)
    assert [added.computed_token_count for added in plan.added] == [0, 8]


def test_idle_blocks_of_answered_steps_survive() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("a", list(range(9)), max_tokens=1))
    scheduler.update(result(planned(scheduler), {0: 30}))
    cached = scheduler.stats().kv_cached_tokens
    add(scheduler, request("b", list(range(9))))
    assert reconnected(scheduler).added[0].computed_token_count == cached == 8


def test_a_second_loss_drops_only_what_the_second_claim_left_open() -> None:
    scheduler = scheduler_of(config())
    for name in ("a", "b"):
        add(scheduler, request(name, list(range(9)), max_tokens=1))
        scheduler.update(result(planned(scheduler), {0: 30}))
    add(scheduler, request("c", list(range(16))))
    assert reconnected(scheduler).added[0].computed_token_count == 8
    assert reconnected(scheduler).added[0].computed_token_count == 8, "though step 1 was open"


def test_open_drafts_count_as_not_computed() -> None:
    scheduler = scheduler_of(config(drafts=3, inflight=2))
    add(scheduler, request("a", [1, 2, 3]))
    scheduler.update(result(planned(scheduler), {0: 30}))
    first = planned(scheduler)
    planned(scheduler)
    scheduler.update(several_result(first, {0: [31, 32, 33, 34]}))
    planned(scheduler)
    plan = reconnected(scheduler)
    assert list(plan.added[0].token_ids) == [1, 2, 3, 30, 31, 32, 33, 34]
    assert plan.added[0].computed_token_count == 4


def test_nothing_is_kept_by_default_and_nothing_of_other_weights_ever() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("a", list(range(9))))
    scheduler.update(result(planned(scheduler), {0: 30}))
    limits = scheduler.ledger.config
    for changed, weights in (
        (limits, WeightVersion(1, "v")),
        (replace(limits, block_count=40), WEIGHTS),
        (replace(limits, enable_prefix_caching=False), WEIGHTS),
    ):
        with pytest.raises(AssertionError):
            scheduler.resync(changed, 8, weights, keep_kv=True)
    scheduler.resync(limits, 8, WEIGHTS)
    assert planned(scheduler).added[0].computed_token_count == 0


def test_limits_may_change_while_the_kv_is_kept() -> None:
    scheduler = scheduler_of(config(budget=32))
    add(scheduler, request("a", list(range(12))))
    add(scheduler, request("b", list(range(9)), arrival=1.0))
    scheduler.update(result(planned(scheduler), {0: 30, 1: 31}))
    limits = replace(scheduler.ledger.config, max_sequence_token_count=11, max_sequence_count=1)
    [output] = scheduler.resync(limits, 8, WEIGHTS, keep_kv=True)
    assert output.finish is not None and output.finish.reason is FinishReason.LENGTH
    assert planned(scheduler).added[0].computed_token_count == 8
    invariants.check(scheduler)
