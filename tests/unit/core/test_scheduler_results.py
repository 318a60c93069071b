"""What results do to requests, and which results are refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from control_plane.core import invariants
from control_plane.core.errors import ResultMismatch
from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.core.plan import Row, RowFault, StepResult
from control_plane.core.spans import WeightsSpan
from control_plane.core.tokens import Tokens
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
    several_result,
)


@pytest.mark.parametrize(
    ("token", "reason", "stop_token"),
    [
        (9, FinishReason.STOP, 9),
        (8, FinishReason.STOP, None),
        (7, FinishReason.LENGTH, None),
    ],
)
def test_why_a_request_ends(token: int, reason: FinishReason, stop_token: int | None) -> None:
    scheduler = scheduler_of(config())
    asked = request("a", [1, 2], max_tokens=1, stops=frozenset({9}), ends=frozenset({8}))
    add(scheduler, asked)
    [output] = scheduler.update(result(planned(scheduler), {0: token}))
    assert output.tokens.ids == [token]
    assert output.finish is not None
    assert (output.finish.reason, output.finish.stop_token_id) == (reason, stop_token)
    assert output.finish.usage == Usage(2, 0, 1)


def test_the_models_length_ends_a_request_before_max_tokens() -> None:
    scheduler = scheduler_of(config(longest=4))
    add(scheduler, request("a", [1, 2], max_tokens=100))
    scheduler.update(result(planned(scheduler), {0: 5}))
    [output] = scheduler.update(result(planned(scheduler), {0: 5}))
    assert output.finish is not None and output.finish.reason is FinishReason.LENGTH


def test_a_stop_drops_the_tokens_sampled_beyond_it() -> None:
    scheduler = scheduler_of(config(inflight=2))
    add(scheduler, request("a", [1, 2], ends=frozenset({8})))
    plans = [planned(scheduler), planned(scheduler)]
    [output] = scheduler.update(result(plans[0], {0: 8}))
    assert output.finish is not None and output.finish.usage.completion_tokens == 1
    assert scheduler.update(result(plans[1], {0: 3})) == []
    assert scheduler.stats().generated_tokens == 1


def test_a_fault_ends_its_row_alone_and_nothing_of_it_stays_cached() -> None:
    scheduler = scheduler_of(config(inflight=2))
    add(scheduler, request("a", [1, 2, 3, 4, 5]))
    add(scheduler, request("b", [6, 7]))
    plans = [planned(scheduler), planned(scheduler)]
    fault = RowFault(Row(0), "INVALID_LOGITS", "NaN")
    outputs = scheduler.update(replace(result(plans[0], {1: 4}), faults=[fault]))
    assert [(name_of(output), output.tokens.ids) for output in outputs] == [("b", [4]), ("a", [])]
    finish = outputs[1].finish
    assert finish is not None
    assert (finish.reason, finish.detail) == (FinishReason.FAULT, "INVALID_LOGITS: NaN")
    invariants.check(scheduler)
    # The step behind it was sent before anybody knew: its row may fault again or have a token.
    [output] = scheduler.update(replace(result(plans[1], {1: 4}), faults=[fault]))
    assert name_of(output) == "b"
    add(scheduler, request("c", [1, 2, 3, 4, 5]))
    assert planned(scheduler).added[0].computed_token_count == 0


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: replace(r, step_id=2),
        lambda r: replace(r, epoch=6),
        lambda r: replace(r, rows=[Row(1), Row(0)]),
        lambda r: replace(r, rows=[Row(0)], tokens=Tokens([5]), token_counts=[1]),
        lambda r: replace(r, tokens=Tokens([5])),
        lambda r: replace(r, tokens=Tokens([5, 6, 7])),
        lambda r: replace(r, tokens=Tokens([5, -1])),
        lambda r: replace(r, tokens=Tokens([5, 2**32])),
        lambda r: replace(r, token_counts=[2, 0]),
        lambda r: replace(r, faults=[RowFault(Row(0), "INVALID_LOGITS", "")]),
        lambda r: replace(r, faults=[RowFault(Row(3), "INVALID_LOGITS", "")]),
        lambda r: replace(
            r,
            rows=[Row(0)],
            tokens=Tokens([5]),
            token_counts=[1],
            faults=[RowFault(Row(1), "INVALID_LOGITS", "")] * 2,
        ),
    ],
)
def test_a_result_that_no_plan_asked_for_changes_nothing(
    spoil: Callable[[StepResult], StepResult],
) -> None:
    scheduler = scheduler_of(config(inflight=2))
    add(scheduler, request("a", [1, 2]))
    add(scheduler, request("b", [3]))
    right = result(planned(scheduler), {0: 5, 1: 6})
    planned(scheduler)
    before = scheduler.stats()
    with pytest.raises(ResultMismatch):
        scheduler.update(spoil(right))
    assert scheduler.stats() == before
    invariants.check(scheduler)
    assert len(scheduler.update(replace(right, token_counts=[]))) == 2


def test_a_result_with_no_plan_in_flight_is_refused() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("a", [1, 2], max_tokens=1))
    answered = result(planned(scheduler), {0: 5})
    scheduler.update(answered)
    with pytest.raises(ResultMismatch, match="no plan is in flight"):
        scheduler.update(answered)


class StopAt:
    """Completes a stop string with a certain token."""

    def __init__(self, token: int) -> None:
        self._token = token
        self.seen: list[int] = []

    def push(self, token_ids: list[int]) -> int | None:
        self.seen += token_ids
        return token_ids.index(self._token) + 1 if self._token in token_ids else None


def test_a_stop_string_ends_a_sequence_at_the_source() -> None:
    scheduler = scheduler_of(config(inflight=2))
    scanner = StopAt(6)
    add(scheduler, request("a", [1, 2]), scanner)
    plans = [planned(scheduler), planned(scheduler)]
    [output] = scheduler.update(result(plans[0], {0: 6}))
    assert output.tokens.ids == [6]
    spans = (WeightsSpan(1, WEIGHTS.digest),)
    assert output.finish == Finish(FinishReason.STOP, Usage(2, 0, 1), started_at=0.0, spans=spans)
    assert scheduler.update(result(plans[1], {0: 7})) == []
    assert scanner.seen == [6], "nothing is scanned after the match"
    stats = scheduler.stats()
    assert (stats.generated_tokens, stats.finished[FinishReason.STOP]) == (1, 1)
    invariants.check(scheduler)


@pytest.mark.parametrize("token", [9, 8, 7])
def test_a_stop_string_wins_over_an_end_that_comes_with_the_same_token(token: int) -> None:
    scheduler = scheduler_of(config())
    asked = request("a", [1, 2], max_tokens=1, stops=frozenset({9}), ends=frozenset({8}))
    add(scheduler, asked, StopAt(token))
    [output] = scheduler.update(result(planned(scheduler), {0: token}))
    spans = (WeightsSpan(1, WEIGHTS.digest),)
    assert output.finish == Finish(FinishReason.STOP, Usage(2, 0, 1), started_at=0.0, spans=spans)


def test_a_stop_string_cuts_the_tokens_of_a_step_and_the_scanner_sees_none_behind_an_end() -> None:
    for match, stops, kept, seen in (
        (6, frozenset[int](), [5, 6], [5, 6, 7]),
        (7, frozenset({6}), [5, 6], [5, 6]),
    ):
        scheduler = scheduler_of(config(drafts=2))
        scanner = StopAt(match)
        add(scheduler, request("a", [1, 2], stops=stops), scanner)
        scheduler.update(result(planned(scheduler), {0: 3}))
        plan = planned(scheduler)
        [output] = scheduler.update(several_result(plan, {0: [5, 6, 7]}))
        assert output.tokens.ids == kept and scanner.seen == [3, *seen]
        assert output.finish is not None and output.finish.reason is FinishReason.STOP
        assert output.finish.usage.completion_tokens == scheduler.stats().generated_tokens == 3


def test_columns_beside_the_tokens_are_cut_with_them() -> None:
    scheduler = scheduler_of(config())
    for number, name in enumerate("ab"):
        add(scheduler, request(name, [1, 2], arrival=float(number)))
    answer = result(planned(scheduler), {0: 5, 1: 6})
    answer = replace(answer, tokens=Tokens([5, 6], [-0.5, -0.25], [1, 3]))
    outputs = scheduler.update(answer)
    assert [output.tokens for output in outputs] == [
        Tokens([5], [-0.5], [1]),
        Tokens([6], [-0.25], [3]),
    ]
    odd = result(planned(scheduler), {0: 5, 1: 6})
    with pytest.raises(ResultMismatch, match="different lengths"):
        scheduler.update(replace(odd, tokens=Tokens([5, 6], [-0.5])))


def test_a_mismatch_tells_the_story_of_the_sequences_it_is_about() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("a", [1, 2]))
    plan = planned(scheduler)
    add(scheduler, request("b", [1, 2]))
    with pytest.raises(ResultMismatch) as refused:
        scheduler.update(result(plan, {3: 5}))
    assert refused.value.story == scheduler.story(sequence("a"))
    assert [line.split(": ", 1)[1] for line in refused.value.story] == [
        "submitted",
        "started in row 0, 0 tokens cached",
    ]
