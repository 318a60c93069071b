"""A claim's life: what each event changes, and the exact verdict on each end."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from control_plane.core.claim import (
    Backoff,
    Claim,
    ClaimEnd,
    ClaimPolicy,
    ClaimState,
    EndKind,
    Loudness,
    Verdict,
)

POLICY = ClaimPolicy(
    loss_patience=60.0,
    starting_delay=0.5,
    first_retry_delay=1.0,
    longest_retry_delay=4.0,
    contention_delay=10.0,
    longest_contention_delay=40.0,
    max_failed_claims=3,
)
UNREACHABLE = ClaimEnd(EndKind.UNREACHABLE, "no such socket")
BROKEN = ClaimEnd(EndKind.UNREACHABLE, "connection broken")
LOADING = ClaimEnd(EndKind.LOADING, "WORKER_LOADING")
DRAINING = ClaimEnd(EndKind.DRAINING, "WORKER_DRAINING")
CONTESTED = ClaimEnd(EndKind.CONTESTED, "STALE_EPOCH")
REFUSED = ClaimEnd(EndKind.REFUSED, "PLAN_MISMATCH")


def longest_jitter() -> float:
    """Every delay is its full length (jitter never reaches 1; here it may)."""
    return 1.0


def claim(policy: ClaimPolicy = POLICY) -> Claim:
    return Claim(policy, longest_jitter)


def silent(delay: float) -> Verdict:
    return Verdict(delay, Loudness.SILENT)


def info(delay: float) -> Verdict:
    return Verdict(delay, Loudness.INFO)


def warning(delay: float, *, accuses: bool = True) -> Verdict:
    return Verdict(delay, Loudness.WARNING, accuses)


def test_the_states_and_what_leads_from_one_to_another() -> None:
    made = claim()
    assert made.state(0.0) is ClaimState.NEVER_ATTACHED
    made.ended(UNREACHABLE, 0.0)
    assert made.state(1e9) is ClaimState.NEVER_ATTACHED, "what was never there is not lost"
    assert not made.is_attached
    made.attached(100.0)
    assert made.is_attached
    assert made.state(1e9) is ClaimState.ATTACHED
    made.ended(BROKEN, 200.0)
    assert not made.is_attached
    assert made.state(200.0) is ClaimState.LOST
    made.ended(UNREACHABLE, 230.0)
    assert made.state(259.0) is ClaimState.LOST
    assert made.state(260.0) is ClaimState.GONE, "counted from the loss, not from the last attempt"
    made.attached(300.0)
    assert made.state(300.0) is ClaimState.ATTACHED


def test_patience_counts_from_the_loss() -> None:
    made = claim()
    assert made.patience_left(5.0) == math.inf
    made.attached(10.0)
    assert made.patience_left(500.0) == math.inf
    made.ended(BROKEN, 500.0)
    assert made.patience_left(500.0) == 60.0
    made.ended(UNREACHABLE, 530.0)
    assert made.patience_left(530.0) == 30.0
    assert made.patience_left(600.0) == 0.0
    made.attached(601.0)
    assert made.patience_left(601.0) == math.inf


def test_without_patience_a_loss_is_the_end_at_once() -> None:
    made = claim(ClaimPolicy(loss_patience=0.0))
    made.attached(1.0)
    made.ended(BROKEN, 2.0)
    assert made.state(2.0) is ClaimState.GONE


def test_a_worker_that_starts_is_asked_at_an_even_pace() -> None:
    made = claim()
    assert made.ended(UNREACHABLE, 0.0) == info(0.5)
    assert made.ended(UNREACHABLE, 0.5) == silent(0.5)
    assert made.ended(LOADING, 1.0) == info(0.5)
    assert made.ended(LOADING, 1.5) == silent(0.5)
    assert made.ended(UNREACHABLE, 2.0) == silent(0.5), "told before"


def test_a_cause_that_lasts_is_told_again() -> None:
    """Once a minute, and louder; but loading and draining pass by themselves."""
    made = claim(ClaimPolicy(reminder=60.0))
    loudness = [made.ended(UNREACHABLE, float(second)).loudness for second in range(0, 200, 10)]
    told = {n * 10: how for n, how in enumerate(loudness) if how is not Loudness.SILENT}
    assert told == {
        0: Loudness.INFO, 60: Loudness.WARNING, 120: Loudness.WARNING, 180: Loudness.WARNING,
    }  # fmt: skip
    assert made.ended(LOADING, 200.0).loudness is Loudness.INFO
    assert made.ended(LOADING, 270.0).loudness is Loudness.INFO
    assert made.ended(REFUSED, 270.0).loudness is Loudness.WARNING
    assert made.ended(REFUSED, 290.0).loudness is Loudness.SILENT
    assert made.ended(REFUSED, 330.0).loudness is Loudness.WARNING


def test_a_worker_that_starts_and_refuses_is_asked_less_and_less() -> None:
    made = claim()
    delays = [made.ended(REFUSED, 0.0).retry_after for _ in range(4)]
    assert delays == [1.0, 2.0, 4.0, 4.0]


def test_a_lost_worker_is_asked_less_and_less_until_a_claim_has_lasted() -> None:
    made = claim()
    made.attached(0.0)
    assert made.ended(BROKEN, 1.0) == warning(1.0)
    assert made.ended(UNREACHABLE, 2.0) == info(2.0)
    assert made.ended(LOADING, 4.0) == info(4.0)
    assert made.ended(UNREACHABLE, 8.0) == silent(4.0)
    made.attached(12.0)
    assert made.ended(BROKEN, 16.0) == warning(4.0), "a short claim proves nothing"
    made.attached(20.0)
    assert made.ended(BROKEN, 24.1) == warning(1.0)


def test_causes_are_told_again_after_a_claim() -> None:
    made = claim()
    made.attached(0.0)
    made.ended(BROKEN, 1.0)
    assert made.ended(UNREACHABLE, 1.0).loudness is Loudness.INFO
    assert made.ended(BROKEN, 1.0).loudness is Loudness.SILENT
    made.attached(2.0)
    made.ended(BROKEN, 3.0)
    assert made.ended(UNREACHABLE, 3.0).loudness is Loudness.INFO


def test_another_controller_is_given_way_to_ever_longer() -> None:
    made = claim()
    made.attached(0.0)
    assert made.ended(CONTESTED, 1.0) == warning(10.0, accuses=False)
    assert made.ended(CONTESTED, 11.0) == warning(20.0, accuses=False), "loud each time"
    made.attached(31.0)
    assert made.ended(CONTESTED, 71.0) == warning(40.0, accuses=False), (
        "a short claim does not end a rivalry"
    )
    made.attached(111.0)
    assert made.ended(CONTESTED, 151.0) == warning(40.0, accuses=False)
    made.attached(191.0)
    assert made.ended(CONTESTED, 231.1) == warning(10.0, accuses=False), (
        "it has lasted: this is another rival"
    )


def test_a_long_claim_ends_a_rivalry_however_it_ended() -> None:
    made = claim()
    made.attached(0.0)
    made.ended(CONTESTED, 1.0)
    made.attached(11.0)
    made.ended(BROKEN, 60.0)
    made.attached(61.0)
    assert made.ended(CONTESTED, 62.0) == warning(10.0, accuses=False)


@pytest.mark.parametrize("end", [BROKEN, REFUSED])
def test_what_was_in_flight_is_accused_of_an_end(end: ClaimEnd) -> None:
    made = claim()
    made.attached(0.0)
    assert made.ended(end, 1.0).accuses_inflight
    assert not made.ended(end, 2.0).accuses_inflight, "an attempt that failed accuses nobody"


@pytest.mark.parametrize("end", [CONTESTED, LOADING, DRAINING])
def test_some_ends_have_nothing_to_do_with_what_was_in_flight(end: ClaimEnd) -> None:
    made = claim()
    made.attached(0.0)
    assert not made.ended(end, 1.0).accuses_inflight


def test_delays_are_drawn_from_the_upper_half() -> None:
    draws: Iterator[float] = iter((0.0, 0.5, 1.0, 0.0, 0.0))
    backoff = Backoff(1.0, 4.0, lambda: next(draws))
    assert [backoff.next() for _ in range(4)] == [0.5, 1.5, 4.0, 2.0]
    backoff.reset()
    assert backoff.next() == 0.5
