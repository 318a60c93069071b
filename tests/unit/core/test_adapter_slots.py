"""Who gets an adapter slot, who is evicted, and that waiting for one blocks nobody else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core import invariants
from control_plane.core.adapter_turns import PATIENCE_SECONDS
from control_plane.core.adapters import AdapterLoad
from control_plane.core.events import FinishReason
from control_plane.core.plan import StepPlan
from control_plane.core.prefix_cache import PrefixCache
from control_plane.core.request import Adapter, SequenceId
from control_plane.core.scheduler import Scheduler
from tests.support.core_requests import WEIGHTS, config, request, result


def adapter(digest: str) -> Adapter:
    return Adapter(f"name of {digest}", digest)


class Desk:
    """A scheduler whose worker answers at once, and its loads when they are asked for."""

    def __init__(self, slots: int, rows: int = 4, held: dict[int, str] | None = None) -> None:
        limits = replace(config(rows=rows, budget=64), adapter_slot_count=slots)
        self.core = Scheduler(limits, 7, WEIGHTS, held)
        self.loads: list[AdapterLoad] = []
        self.now = 0.0
        self.last = 0

    def add(self, digest: str = "", tokens: int = 8) -> SequenceId:
        self.last += 1
        name = SequenceId(self.last)
        asked = request(str(self.last), [1, 2, 3, self.last], max_tokens=tokens, arrival=self.now)
        self.core.add(name, replace(asked, adapter=adapter(digest) if digest else None))
        return name

    def turn(self, seconds: float = 0.0) -> StepPlan | None:
        """A plan and its result, and what loads it asks for."""
        self.now += seconds
        plan = self.core.next_message(self.now)
        self.loads += self.core.adapters.take_loads()
        if plan is not None:
            assert isinstance(plan, StepPlan)
            self.core.update(result(plan, dict.fromkeys(plan.scheduled.rows, 1)))
        invariants.check(self.core)
        return plan

    def loaded(self) -> list[str]:
        """Answers all loads; returns what they were, as slot and digest."""
        told = [f"{load.slot}:{load.digest}" for load in self.loads]
        for load in self.loads:
            self.core.adapters.loaded(load)
        self.loads.clear()
        return told

    @property
    def running(self) -> list[int]:
        return [sequence.sequence_id for sequence in self.core.ledger.running]


def test_a_plan_names_slot_and_digest_once_the_adapter_is_there() -> None:
    desk = Desk(slots=2)
    desk.add("a")
    assert desk.turn() is None and desk.loads == [AdapterLoad(1, "a", "name of a")]
    desk.loaded()
    plan = desk.turn()
    assert plan is not None
    assert [(own.adapter_slot, own.adapter_digest) for own in plan.added] == [(1, "a")]


def test_who_waits_for_an_adapter_blocks_nobody() -> None:
    desk = Desk(slots=1)
    desk.add("a")
    desk.add()
    desk.add("a")
    desk.add()
    desk.turn()
    assert desk.running == [2, 4]
    assert desk.core.stats().adapters_waiting == 2 and desk.core.stats().waiting == 2
    assert desk.loaded() == ["1:a"]
    desk.turn()
    assert desk.running == [1, 2, 3, 4]


def test_the_slot_that_was_used_least_recently_is_given_away() -> None:
    desk = Desk(slots=2, held={1: "a", 2: "b"})
    desk.add("b", tokens=1)
    desk.turn()
    desk.add("a", tokens=1)
    desk.turn()
    desk.turn()  # their rows are removed
    desk.add("c")
    desk.turn()
    assert desk.loaded() == ["2:c"]
    stats = desk.core.stats()
    assert (stats.adapter_hits, stats.adapter_waits) == (2, 1)
    assert (stats.adapter_loads, stats.adapter_evictions) == (1, 1)


def test_a_slot_is_not_given_away_before_its_rows_have_left_the_worker() -> None:
    desk = Desk(slots=1, held={1: "a"})
    first = desk.add("a")
    desk.turn()
    desk.core.finish(first, FinishReason.CANCELLED)
    desk.add("b")
    plan = desk.core.next_message(desk.now)
    assert isinstance(plan, StepPlan) and plan.removed_rows == [0]
    assert desk.core.adapters.take_loads() == []
    desk.core.update(result(plan, dict.fromkeys(plan.scheduled.rows, 1)))
    desk.turn()
    assert desk.loaded() == ["1:b"]


@pytest.mark.parametrize("pinned", ["a", "b"])
def test_a_pinned_adapter_stays(pinned: str) -> None:
    desk = Desk(slots=2, held={1: "a", 2: "b"})
    desk.core.adapters.pin(frozenset(pinned))
    desk.add("c")
    desk.turn()
    assert desk.loaded() == ["2:c" if pinned == "a" else "1:c"]


def test_where_all_are_pinned_none_is() -> None:
    desk = Desk(slots=1, held={1: "a"})
    desk.core.adapters.pin(frozenset("a"))
    desk.add("b")
    desk.turn()
    assert desk.loaded() == ["1:b"]


def test_a_slot_closes_for_whoever_has_waited_long() -> None:
    """Requests for one adapter never end; another's gets the slot all the same."""
    desk = Desk(slots=1, held={1: "a"})
    desk.add("a", tokens=6)
    desk.turn()
    waiter = desk.add("b")
    for _ in range(3):
        desk.add("a", tokens=6)
        desk.turn()
    assert desk.running == [1, 3, 4, 5], "a short wait closes nothing"
    desk.turn(PATIENCE_SECONDS)
    late = desk.add("a", tokens=6)
    for _ in range(20):
        desk.turn()
        if desk.loads:
            break
    assert desk.loaded() == ["1:b"]
    desk.turn()
    assert desk.running == [waiter] and late in desk.core.ledger.sequences


def test_a_closed_slot_opens_when_nobody_waits_for_it() -> None:
    desk = Desk(slots=1, held={1: "a"})
    desk.add("a")
    desk.turn()
    waiter = desk.add("b")
    desk.turn(PATIENCE_SECONDS)
    late = desk.add("a")
    assert desk.core.ledger.sequences[late].awaits_adapter
    desk.core.finish(waiter, FinishReason.CANCELLED)
    desk.turn()
    assert desk.running == [1, late]


def test_a_free_slot_goes_to_whoever_ranks_first() -> None:
    desk = Desk(slots=1, held={1: "a"})
    holder = desk.add("a")
    desk.turn()
    desk.add("b")
    desk.now += 0.1
    desk.add("c")
    desk.turn()
    desk.core.finish(holder, FinishReason.CANCELLED)
    desk.turn()
    desk.turn()
    assert desk.loaded() == ["1:b"]


def test_a_load_that_fails_ends_those_that_wait_for_it_and_no_others() -> None:
    desk = Desk(slots=2)
    failing, other = desk.add("a"), desk.add("b")
    desk.turn()
    first, _ = desk.loads
    outputs = desk.core.adapters.refused(first, "no such folder")
    assert [output.sequence_id for output in outputs] == [failing]
    finish = outputs[0].finish
    assert finish is not None and finish.detail == "no such folder"
    assert finish.reason is FinishReason.ADAPTER_UNAVAILABLE
    desk.loads.pop(0)
    desk.loaded()
    desk.turn()
    assert desk.running == [other]


def test_a_load_of_which_nobody_knows_is_asked_for_again() -> None:
    desk = Desk(slots=1)
    desk.add("a")
    desk.turn()
    desk.core.adapters.lost(desk.loads.pop())
    desk.turn()
    assert desk.loaded() == ["1:a"]


def test_another_life_of_the_worker_has_the_adapters_that_it_says() -> None:
    desk = Desk(slots=2, held={1: "a", 2: "b"})
    desk.add("a")
    desk.add("b")
    desk.turn()
    limits = desk.core.ledger.config
    desk.core.resync(limits, 8, WEIGHTS, adapters={2: "b"})
    invariants.check(desk.core)
    plan = desk.turn()
    assert plan is not None and [own.adapter_slot for own in plan.added] == [2]
    assert desk.loaded() == ["1:a"]


def test_blocks_of_adapters_and_salts_are_kept_apart() -> None:
    cache = PrefixCache(4, "w", True)
    pairs = [("", ""), ("", "a"), ("a", ""), ("a", "a"), ("", "aa"), ("aa", ""), ("1,1:", "a")]
    assert len({cache.root(salt, digest) for salt, digest in pairs}) == len(pairs)
