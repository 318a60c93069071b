"""Where sequences go while replicas have different weights, or are held."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from control_plane.core.config import SchedulerConfig
from control_plane.core.fleet import Member, MemberState, evacuation, places, relief
from control_plane.core.plan import StepResult, WeightVersion
from control_plane.core.request import SequenceId
from control_plane.core.scheduler import Scheduler
from control_plane.core.succession import Traits
from control_plane.core.tokens import Tokens
from tests.simulation.rig import request

OLD, NEW = "a" * 64, "b" * 64
LIMITS = SchedulerConfig(
    max_sequence_count=2,
    max_step_token_count=32,
    max_sequence_token_count=32,
    block_count=40,
    block_size=4,
)
ids = map(SequenceId, count(1))


def member(
    number: int, digest: str = OLD, *, takes_over: bool = False, is_held: bool = False
) -> Member:
    core = Scheduler(LIMITS, 1, WeightVersion(1, digest))
    traits = Traits(digest, "one", 97, 32, takes_over=takes_over)
    return Member(number, core, traits, MemberState.ATTACHED, is_held=is_held)


def begin(own: Member) -> SequenceId:
    sequence_id = next(ids)
    own.core.add(sequence_id, request("r", (5, 6, 7), 8))
    plan = own.core.schedule(0.0)
    assert plan is not None
    rows = list(plan.scheduled.rows)
    own.core.update(StepResult(1, plan.step_id, rows, [1] * len(rows), Tokens([9] * len(rows))))
    return sequence_id


def targets(source: Member, *others: Member) -> list[int]:
    lost = replace(source, state=MemberState.LOST)
    return [move.target for move in evacuation(lost, [lost, *others], may_cross=False)]


def test_who_has_begun_goes_where_its_weights_are() -> None:
    source = member(0)
    begin(source)
    busy = member(2)
    begin(busy)
    assert targets(source, member(1, NEW, takes_over=True), busy) == [2], "though that one is busy"


@pytest.mark.parametrize(("takes_over", "expected"), [(False, []), (True, [1])])
def test_elsewhere_it_goes_only_where_the_policy_lets_it(
    takes_over: bool, expected: list[int]
) -> None:
    source = member(0)
    begin(source)
    assert targets(source, member(1, NEW, takes_over=takes_over)) == expected


def test_who_has_not_begun_goes_anywhere() -> None:
    source = member(0)
    source.core.add(next(ids), request("r", (5, 6, 7), 8))
    assert targets(source, member(1, NEW)) == [1]


def test_who_is_held_takes_nobody_whom_another_can_take() -> None:
    source, held = member(0), member(1, is_held=True)
    begin(source)
    busy = member(2)
    begin(busy)
    begin(busy)
    assert targets(source, held, busy) == [2]
    assert targets(source, held) == [1]
    [first, _] = places([held, busy], request("n", (5, 6, 7), 8))
    assert first.number == 2
    assert relief(held, [source], may_cross=False) is None


def test_who_waits_where_nothing_moves_goes_to_a_free_place() -> None:
    """But one that has tokens waits for its own weights."""
    source = member(0, is_held=True)
    begun, fresh = begin(source), next(ids)
    source.core.ledger.preempt(source.core.ledger.sequences[begun])
    other = member(1, NEW, takes_over=True)
    assert relief(other, [source], may_cross=False) is None
    source.core.add(fresh, request("n", (5, 6, 7), 8))
    move = relief(other, [source], may_cross=False)
    assert move is not None and move.sequence_id == fresh
    move = relief(member(2), [source], may_cross=False)
    assert move is not None and move.sequence_id == begun
