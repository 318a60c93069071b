"""A sequence that moves to another core, at any step, gets what it gets undisturbed; and the core
that it leaves is as if it had never been there.
"""

from __future__ import annotations

from array import array

import pytest

from control_plane.core import invariants
from control_plane.core.events import FinishReason
from control_plane.core.request import (
    OutputKind,
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
)
from control_plane.core.room import backlog_token_count
from tests.support.core_harness import Harness
from tests.support.core_requests import config
from tests.support.quick import spread

MOVED, NEIGHBOUR = SequenceId(1), SequenceId(2)
PROMPT = [1, 2, 3, 4, 0, 1, 2, 3, 4]


def request(name: SequenceId, output: OutputKind = OutputKind.SAMPLE) -> Request:
    return Request(
        request_id=RequestId(str(name)),
        prompt_token_ids=array("I", PROMPT),
        sampling=SamplingParams(temperature=0.0),
        seed=name,
        stop=StopConditions(max_tokens=12),
        arrival=float(name),
        output=output,
    )


def move(name: SequenceId, source: Harness, target: Harness) -> None:
    """Between two cores, with what their clients know of it."""
    sequence = source.scheduler.withdraw(name)
    target.scheduler.adopt(sequence)
    target.salts[name] = source.salts[name]
    target.requests[name] = source.requests.pop(name)
    target.pairs[name] = source.pairs.pop(name)
    target.outputs[name] = source.outputs.pop(name)
    target.made[name] = source.made.pop(name)
    if name in source.unmasked:
        source.unmasked.remove(name)
        target.unmasked.add(name)


def turn(harness: Harness) -> None:
    """Everything is sent that may be, and one result comes."""
    while harness.send() is not None:
        invariants.check(harness.scheduler)
    if harness.outstanding:
        harness.deliver()
    elif harness.unmasked:
        harness.allow(min(harness.unmasked))
    invariants.check(harness.scheduler)


def run_to_the_end(*harnesses: Harness) -> None:
    for _ in range(300):
        for harness in harnesses:
            if harness.scheduler.has_work:
                turn(harness)
    assert not any(harness.scheduler.has_work for harness in harnesses)
    for harness in harnesses:
        assert not harness.worker.rows
        assert harness.scheduler.stats().kv_active_tokens == 0


CASES = [
    (after, inflight, drafts, output)
    for after in range(16)
    for inflight in (1, 2)
    for drafts, output in (
        (0, OutputKind.SAMPLE), (2, OutputKind.SAMPLE), (0, OutputKind.HOLD),
    )
]  # fmt: skip


@pytest.mark.parametrize(("after", "inflight", "drafts", "output"), spread(CASES, 40))
def test_moved_at_any_step_it_gets_what_it_gets_undisturbed(
    after: int, inflight: int, drafts: int, output: OutputKind
) -> None:
    """And so does its neighbour, whose place it takes and leaves."""
    limits = config(budget=4, inflight=inflight, drafts=drafts)
    source, target = Harness(limits), Harness(limits)
    source.submit(request(MOVED, output))
    target.submit(request(NEIGHBOUR))
    for _ in range(after):
        turn(source)
        turn(target)
    if MOVED in source.reasons:
        return
    free = source.scheduler.ledger.pool.free_count
    held = len(source.scheduler.ledger.sequences[MOVED].blocks)
    move(MOVED, source, target)
    invariants.check(source.scheduler)
    invariants.check(target.scheduler)
    assert source.scheduler.ledger.pool.free_count == free + held
    assert len(source.scheduler.ledger.free_rows) == limits.max_sequence_count
    assert target.scheduler.ledger.waiting.first.sequence_id == MOVED, "its rank is the smaller"
    run_to_the_end(source, target)
    assert target.reasons[MOVED] is FinishReason.LENGTH  # the harness compares each token
    assert target.reasons[NEIGHBOUR] is FinishReason.LENGTH
    assert source.scheduler.stats().moved_out == target.scheduler.stats().moved_in == 1


@pytest.mark.parametrize("every", range(1, 9))
def test_it_may_move_again_and_again(every: int) -> None:
    """And comes back to where its own steps may still be in flight."""
    places = [Harness(config(budget=4, inflight=2)), Harness(config(budget=4, inflight=2))]
    places[0].submit(request(MOVED))
    for count in range(1, 120):
        for place in places:
            if place.scheduler.has_work:
                turn(place)
        here = next((place for place in places if MOVED in place.requests), None)
        assert here is not None
        if MOVED in here.reasons:
            break
        if count % (every + 4) == 0:
            move(MOVED, here, places[1 - places.index(here)])
    run_to_the_end(*places)
    assert any(MOVED in place.reasons for place in places)


def test_who_waits_with_a_prefix_counts_what_is_missing() -> None:
    limits = config(rows=1, budget=16)
    source, target = Harness(limits), Harness(limits)
    target.submit(request(NEIGHBOUR))
    source.submit(request(MOVED))
    assert backlog_token_count(source.scheduler.ledger) == len(PROMPT)
    turn(target)
    assert backlog_token_count(target.scheduler.ledger) == 0
    move(MOVED, source, target)
    assert backlog_token_count(source.scheduler.ledger) == 0
    assert backlog_token_count(target.scheduler.ledger) == 1, "two blocks of four are cached there"
