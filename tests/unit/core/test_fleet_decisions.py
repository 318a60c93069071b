"""What core/fleet.py decides, on cores made for it: cases in, moves out."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest

from control_plane.core import invariants
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import FinishReason
from control_plane.core.exchange import Exchange
from control_plane.core.fleet import Member, MemberState, Move, evacuation, places, relief
from control_plane.core.placement import Leads
from control_plane.core.plan import StepResult, WeightVersion
from control_plane.core.request import Request, SequenceId
from control_plane.core.scheduler import Scheduler
from control_plane.core.succession import Traits
from control_plane.core.suspicion import Accusation
from control_plane.core.tokens import Tokens
from tests.simulation.rig import request

PROMPT = (5, 6, 7, 8)
ids = map(SequenceId, count(1))


def member(
    number: int, *, state: MemberState = MemberState.ATTACHED, arithmetic: str = "one",
    length: int = 32, rows: int = 2, block_count: int = 40, block_size: int = 4,
) -> Member:  # fmt: skip
    config = SchedulerConfig(
        max_sequence_count=rows, max_step_token_count=32, max_sequence_token_count=length,
        block_count=block_count, block_size=block_size, max_waiting_count=9,
    )  # fmt: skip
    core = Scheduler(config, 1, WeightVersion(1, "a" * 64))
    return Member(number, core, Traits("a" * 64, arithmetic, 97, length), state)


def asked(name: str = "r", max_tokens: int = 8, priority: int = 0) -> Request:
    return request(name, PROMPT, max_tokens, priority=priority)


def begin(own: Member, prompt: tuple[int, ...] = PROMPT) -> SequenceId:
    """A sequence that runs and has a token."""
    sequence_id = next(ids)
    own.core.add(sequence_id, request("r", prompt, 8))
    plan = own.core.schedule(0.0)
    assert plan is not None
    rows = list(plan.scheduled.rows)
    epoch, counts = own.core.ledger.epoch, [1] * len(rows)
    own.core.update(StepResult(epoch, plan.step_id, rows, counts, Tokens([9] * len(rows))))
    return sequence_id


def wait(own: Member, priority: int = 0, max_tokens: int = 8) -> SequenceId:
    """A sequence that waits."""
    sequence_id = next(ids)
    own.core.add(sequence_id, asked(max_tokens=max_tokens, priority=priority))
    return sequence_id


def fill(own: Member) -> None:
    for _ in range(own.core.ledger.config.max_sequence_count):
        begin(own)


def targets(source: Member, *others: Member, may_cross: bool = False) -> list[int]:
    return [move.target for move in evacuation(source, [source, *others], may_cross=may_cross)]


@pytest.mark.parametrize("state", MemberState)
def test_who_may_take(state: MemberState) -> None:
    """New requests: whoever is there, or may be back. Moves: whoever is there. A free place:
    whoever gives signs of life."""
    there = state in (MemberState.ATTACHED, MemberState.SUSPECT)
    soon = there or state in (MemberState.LOST, MemberState.DRAINING)
    other = member(1, state=state)
    assert [own.number for own in places([other], asked(), Leads())] == ([1] if soon else [])
    both = places([member(0), other], asked(), Leads())
    assert [own.number for own in both] == ([0, 1] if soon else [0])
    lost = member(0, state=MemberState.LOST)
    begin(lost)
    assert targets(lost, other) == ([1] if there else [])
    full = member(2, rows=1)
    fill(full)
    wait(full)
    moves = relief(other, [full], may_cross=False) is not None
    assert moves == (state is MemberState.ATTACHED), "nobody goes to one that is silent"


def test_nobody_is_moved_to_where_it_is() -> None:
    source = member(0)
    begin(source)
    assert targets(source) == []


@pytest.mark.parametrize("may_cross", [False, True])
def test_tokens_go_where_they_round_alike(may_cross: bool) -> None:
    """Also where another place is emptier; and elsewhere only if they may."""
    source = member(0, state=MemberState.LOST)
    begin(source)
    like, other = member(2), member(1, arithmetic="two")
    begin(like)
    assert targets(source, other, like, may_cross=may_cross) == [2]
    assert targets(source, other, may_cross=may_cross) == ([1] if may_cross else [])
    waiting = member(0, state=MemberState.LOST)
    wait(waiting)
    assert targets(waiting, other, may_cross=may_cross) == [1], "without tokens it may always"


@pytest.mark.parametrize(("length", "goes"), [(11, False), (12, True), (13, True), (64, True)])
def test_nobody_is_cut_short_by_a_move(length: int, goes: bool) -> None:
    """Four tokens of prompt and eight to come."""
    source, target = member(0, state=MemberState.LOST), member(1, length=length)
    begin(source)
    assert targets(source, target) == ([1] if goes else [])
    full = member(2, rows=1)
    fill(full)
    wait(full)
    assert (relief(target, [full], may_cross=False) is not None) == goes


def test_a_long_request_goes_where_it_is_whole() -> None:
    short, long = member(0, length=16), member(1, length=32)
    fill(long)
    assert [own.number for own in places([short, long], asked(max_tokens=20), Leads())] == [1, 0]
    assert [own.number for own in places([short, long], asked(max_tokens=8), Leads())] == [0, 1]
    assert [own.number for own in places([short, long], asked(max_tokens=99), Leads())] == [1, 0]


def test_the_first_by_rank_is_relieved() -> None:
    sources = [member(number, rows=1) for number in (1, 2, 3)]
    for source in sources:
        fill(source)
    wait(sources[0])
    first = wait(sources[1], priority=-5)
    wait(sources[1], priority=9)
    wait(sources[2], priority=3)
    for queued in (sources, sources[::-1]):
        move = relief(member(0), queued, may_cross=False)
        assert move is not None
        assert (move.sequence_id, move.source, move.target) == (first, 2, 0)


def test_nobody_overtakes_who_does_not_fit() -> None:
    source, idle = member(1, rows=1), member(0, block_count=9)
    begin(idle, tuple(range(2, 30)))
    fill(source)
    wait(source)
    assert relief(idle, [source], may_cross=False) is None
    assert relief(member(2), [source], may_cross=False) is not None


def test_a_place_is_free_only_behind_a_queue_and_without_a_trial() -> None:
    source = member(1, rows=1)
    fill(source)
    wait(source)
    idle = member(0, rows=2)
    wait(idle)
    assert idle.has_free_place, "the other row"
    assert relief(idle, [source], may_cross=False) is not None
    wait(idle)
    assert not idle.has_free_place
    assert relief(idle, [source], may_cross=False) is None
    on_trial = member(2)
    tried = begin(on_trial)
    on_trial.core.ledger.suspects[tried] = on_trial.core.ledger.sequences[tried]
    assert not on_trial.is_open and not on_trial.has_free_place
    assert relief(on_trial, [source], may_cross=False) is None


def test_who_moves_has_blocks_behind_a_queue_and_tokens_of_the_plan() -> None:
    source = member(1, rows=1)
    fill(source)
    wait(source)
    for prompt_count, fits in ((24, True), (30, False)):
        few_blocks = member(0, block_count=9)
        few_blocks.core.add(next(ids), request("r", tuple(range(2, 2 + prompt_count)), 1))
        assert (relief(few_blocks, [source], may_cross=False) is not None) == fits
    for prompt_count, fits in ((31, True), (32, False)):
        full_plan = member(0, length=64)
        full_plan.core.add(next(ids), request("r", tuple(range(2, 2 + prompt_count)), 1))
        assert (relief(full_plan, [source], may_cross=False) is not None) == fits


@pytest.mark.parametrize("turns", [0, 1], ids=["of who waits", "of who is free"])
@pytest.mark.parametrize("count", range(1, 5))
def test_a_turn_of_either_moves_who_waits(turns: int, count: int) -> None:
    """An idle replica has no turn: whoever has a queue, as after a preemption, gives of it."""
    members = {0: member(0, rows=1), 1: member(1, rows=count)}
    source, idle = members[0], members[1]
    fill(source)
    waiting = [wait(source) for _ in range(count + 1)]
    exchange = Exchange(members.get, may_cross=False)
    exchange.note(source)
    exchange.note(idle)
    moves = []
    for move in exchange.moves(members[turns]):
        moves.append(move)
        idle.core.adopt(source.core.withdraw(move.sequence_id))
    assert moves == [Move(sequence_id, 0, 1) for sequence_id in waiting[:count]]


def test_whoever_starts_anyway_stays() -> None:
    source = member(1)
    wait(source)
    assert relief(member(0), [source], may_cross=False) is None
    lost = replace(source, state=MemberState.LOST)
    assert relief(member(0), [lost], may_cross=False) is not None


def test_suspects_and_those_whose_tokens_fly_stay() -> None:
    source = member(1, rows=1)
    fill(source)
    first, second = wait(source, priority=-2), wait(source, priority=-1)
    ledger = source.core.ledger
    ledger.sequences[first].pending = 1
    move = relief(member(0), [source], may_cross=False)
    assert move is not None and move.sequence_id == second
    ledger.suspects[second] = ledger.sequences[second]
    assert relief(member(0), [source], may_cross=False) is None


@pytest.mark.parametrize("crossed", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_a_move_keeps_the_books_and_tells_of_other_arithmetic(crossed: bool, begun: bool) -> None:
    source, target = member(0), member(1, length=64)
    sequence_id = begin(source) if begun else wait(source)
    own = source.core.ledger.sequences[sequence_id]
    own.strikes = 2
    departed = source.core.withdraw(sequence_id)
    target.core.adopt(departed, arithmetic_changed=crossed)
    assert departed.arithmetic_changed is (crossed and begun)
    assert sequence_id in target.core.ledger.suspects, "its strikes go with it"
    assert (source.core.stats().moved_out, target.core.stats().moved_in) == (1, 1)
    assert not departed.blocks and not departed.pending and departed.computed == 0
    assert source.core.stats().kv_active_tokens == 0


def end_claim(own: Member, times: int) -> None:
    """So many claims that end over the one sequence that runs; none of them brings a token."""
    sequence_id = wait(own)
    for _ in range(times):
        assert own.core.schedule(0.0) is not None
        own.core.accuse(Accusation(), 9)
        ledger = own.core.ledger
        own.core.resync(ledger.config, ledger.epoch + 1, WeightVersion(1, "a" * 64))
    own.core.finish(sequence_id, FinishReason.CANCELLED)


@pytest.mark.parametrize(
    ("ends", "gets_token", "is_other_full", "first"),
    [
        (0, False, False, 0),
        (1, False, False, 0),  # bad luck
        (2, False, False, 1),
        (5, False, False, 1),
        (5, True, False, 0),  # it works again
        (5, False, True, 0),  # otherwise nobody would ever find out
    ],
)
def test_who_fails_whoever_runs_is_empty_and_no_good_place(
    ends: int, gets_token: bool, is_other_full: bool, first: int
) -> None:
    doubtful, other = member(0), member(1)
    begin(other)
    if is_other_full:
        fill(other)
        wait(other)
    end_claim(doubtful, ends)
    assert not doubtful.core.ledger.sequences
    if gets_token:
        doubtful.core.finish(begin(doubtful), FinishReason.CANCELLED)
    found = places([doubtful, other], asked())
    assert [own.number for own in found] == [first, 1 - first]
    lost = member(2, state=MemberState.LOST)
    begin(lost)
    assert targets(lost, doubtful, other) == [first]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [12, 16, 64])
def test_a_move_fits_a_sequence_to_the_limits_and_blocks_there(
    length: int, block_size: int
) -> None:
    """It has as many tokens as it would have had there from the start, and finds its prefix."""
    source, target = (
        member(0, length=16),
        member(1, length=length, block_size=block_size, block_count=80),
    )
    prompt = tuple(range(2, 11))
    sequence_ids = next(ids), next(ids)
    for own, sequence_id in zip((source, target), sequence_ids, strict=True):
        own.core.add(sequence_id, request(str(sequence_id), prompt, 99))
        plan = own.core.schedule(0.0)
        assert plan is not None
        own.core.update(StepResult(1, plan.step_id, list(plan.scheduled.rows), [1], Tokens([9])))
    target.core.adopt(source.core.withdraw(sequence_ids[0]))
    plan = target.core.schedule(0.0)
    assert plan is not None
    moved, local = (target.core.ledger.sequences[sequence_id] for sequence_id in sequence_ids)
    assert moved.token_limit == local.token_limit == length
    shared = len(prompt) // block_size
    assert moved.blocks[:shared] == local.blocks[:shared]
    invariants.check(target.core)
