"""Limits at the door, and configurations that could not work."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from control_plane.core.admission import Admission
from control_plane.core.errors import QueueFull, RequestTooLong
from control_plane.core.events import FinishReason
from tests.support.core_requests import add, config, planned, request, scheduler_of, sequence


def test_a_prompt_must_leave_room_for_a_token() -> None:
    scheduler = scheduler_of(config(longest=8))
    with pytest.raises(RequestTooLong, match=r"8 tokens; at most 7"):
        add(scheduler, request("a", [1] * 8))
    add(scheduler, request("a", [1] * 7))


def test_ids_are_unique_among_those_that_run_or_wait() -> None:
    scheduler = scheduler_of(config())
    add(scheduler, request("a", [1]))
    with pytest.raises(AssertionError):
        add(scheduler, request("a", [1]))
    planned(scheduler)
    with pytest.raises(AssertionError):
        add(scheduler, request("a", [1]))


@pytest.mark.parametrize("planned_after", range(4))
def test_nobody_is_refused_while_a_row_is_free(planned_after: int) -> None:
    """A burst on an idle server finds as many places before the first step as after it."""
    scheduler = scheduler_of(config(waiting=2, rows=1))
    for count in range(3):
        assert scheduler.room == 3 - count
        add(scheduler, request(f"r{count}", [1]))
        if count == planned_after:
            planned(scheduler)
    assert scheduler.room == 0
    with pytest.raises(QueueFull, match="3 requests run or wait") as refused:
        add(scheduler, request("more", [1]))
    assert refused.value.retry_after == scheduler.retry_after(0.0) == 1.0


def test_a_place_is_free_again_as_soon_as_a_sequence_is_over() -> None:
    scheduler = scheduler_of(config(waiting=1, rows=1))
    add(scheduler, request("a", [1]))
    add(scheduler, request("b", [1]))
    assert scheduler.room == 0
    scheduler.finish(sequence("a"), FinishReason.CANCELLED)
    assert scheduler.room == 1


def test_retry_after_follows_the_pace_of_the_queue() -> None:
    admission = Admission(config())
    assert admission.retry_after(50.0) == 1.0, "nothing is known"
    for now in (0.0, 4.0, 8.0):
        admission.note_start(now)
    assert admission.retry_after(12.0) == 4.0
    assert admission.retry_after(90.0) == 30.0, "the queue has come to a halt"
    assert admission.retry_after(1e9) == 60.0
    assert admission.retry_after(-1.0) == 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_sequence_count": 0}, "max_sequence_count"),
        ({"max_step_token_count": 0}, "max_step_token_count"),
        ({"max_sequence_token_count": 1}, "max_sequence_token_count"),
        ({"block_size": 0}, "block_size"),
        ({"max_waiting_count": 0}, "max_waiting_count"),
        ({"max_inflight_step_count": 0}, "max_inflight_step_count"),
        ({"ageing_seconds": 0.0}, "ageing_seconds"),
        ({"ageing_seconds": float("nan")}, "ageing_seconds"),
        ({"block_count": 8}, "the pool holds 28 tokens"),
    ],
)
def test_configurations_that_could_not_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(config(longest=32), **changes)
