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


def warning(delay: float, *, give_up: bool = False) -> Verdict:
    return Verdict(delay, Loudness.WARNING, give_up)


def test_the_states_and_what_leads_from_one_to_another() -> None:
    made = claim()
    assert made.state(0.0) is ClaimState.NEVER_ATTACHED
    made.ended(UNREACHABLE, 0.0, 0)
    assert made.state(1e9) is ClaimState.NEVER_ATTACHED, "what was never there is not lost"
    assert not made.is_attached
    made.attached(100.0)
    assert made.is_attached
    assert made.state(1e9) is ClaimState.ATTACHED
    made.ended(BROKEN, 200.0, 0)
    assert not made.is_attached
    assert made.state(200.0) is ClaimState.LOST
    made.ended(UNREACHABLE, 230.0, 0)
    assert made.state(259.0) is ClaimState.LOST
    assert made.state(260.0) is ClaimState.GONE, "counted from the loss, not from the last attempt"
    made.attached(300.0)
    assert made.state(300.0) is ClaimState.ATTACHED


def test_patience_counts_from_the_loss() -> None:
    made = claim()
    assert made.patience_left(5.0) == math.inf
    made.attached(10.0)
    assert made.patience_left(500.0) == math.inf
    made.ended(BROKEN, 500.0, 0)
    assert made.patience_left(500.0) == 60.0
    made.ended(UNREACHABLE, 530.0, 0)
    assert made.patience_left(530.0) == 30.0
    assert made.patience_left(600.0) == 0.0
    made.attached(601.0)
    assert made.patience_left(601.0) == math.inf


def test_without_patience_a_loss_is_the_end_at_once() -> None:
    made = claim(ClaimPolicy(loss_patience=0.0))
    made.attached(1.0)
    made.ended(BROKEN, 2.0, 0)
    assert made.state(2.0) is ClaimState.GONE


def test_a_worker_that_starts_is_asked_at_an_even_pace() -> None:
    made = claim()
    assert made.ended(UNREACHABLE, 0.0, 0) == info(0.5)
    assert made.ended(UNREACHABLE, 0.5, 0) == silent(0.5)
    assert made.ended(LOADING, 1.0, 0) == info(0.5)
    assert made.ended(LOADING, 1.5, 0) == silent(0.5)
    assert made.ended(UNREACHABLE, 2.0, 0) == silent(0.5), "told before"


def test_a_worker_that_starts_and_refuses_is_asked_less_and_less() -> None:
    made = claim()
    delays = [made.ended(REFUSED, 0.0, 0).retry_after for _ in range(4)]
    assert delays == [1.0, 2.0, 4.0, 4.0]


def test_a_lost_worker_is_asked_less_and_less_until_it_has_executed_a_step() -> None:
    made = claim()
    made.attached(0.0)
    assert made.ended(BROKEN, 1.0, 0) == warning(1.0)
    assert made.ended(UNREACHABLE, 2.0, 0) == info(2.0)
    assert made.ended(LOADING, 4.0, 0) == info(4.0)
    assert made.ended(UNREACHABLE, 8.0, 0) == silent(4.0)
    made.attached(12.0)
    assert made.ended(BROKEN, 13.0, 0) == warning(4.0), "a claim alone proves nothing"
    made.attached(17.0)
    made.received_result()
    assert made.ended(BROKEN, 18.0, 0) == warning(1.0)


def test_causes_are_told_again_after_a_claim() -> None:
    made = claim()
    made.attached(0.0)
    made.ended(BROKEN, 1.0, 0)
    assert made.ended(UNREACHABLE, 1.0, 0).loudness is Loudness.INFO
    assert made.ended(BROKEN, 1.0, 0).loudness is Loudness.SILENT
    made.attached(2.0)
    made.ended(BROKEN, 3.0, 0)
    assert made.ended(UNREACHABLE, 3.0, 0).loudness is Loudness.INFO


def test_another_controller_is_given_way_to_ever_longer() -> None:
    made = claim()
    made.attached(0.0)
    assert made.ended(CONTESTED, 1.0, 2) == warning(10.0)
    assert made.ended(CONTESTED, 11.0, 0) == warning(20.0), "loud each time"
    made.attached(31.0)
    made.received_result()
    assert made.ended(CONTESTED, 71.0, 2) == warning(40.0), "results do not end a rivalry"
    made.attached(111.0)
    assert made.ended(CONTESTED, 151.0, 2) == warning(40.0)
    made.attached(191.0)
    assert made.ended(CONTESTED, 231.1, 2) == warning(10.0), "it has lasted: this is another rival"


def test_a_long_claim_ends_a_rivalry_however_it_ended() -> None:
    made = claim()
    made.attached(0.0)
    made.ended(CONTESTED, 1.0, 0)
    made.attached(11.0)
    made.ended(BROKEN, 60.0, 0)
    made.attached(61.0)
    assert made.ended(CONTESTED, 62.0, 0) == warning(10.0)


def failed(made: Claim, now: float, end: ClaimEnd = BROKEN, inflight_count: int = 1) -> bool:
    """A claim that ends without a result; whether the requests are given up."""
    made.attached(now)
    return made.ended(end, now, inflight_count).give_up_requests


def test_requests_that_end_several_claims_in_a_row_are_given_up() -> None:
    made = claim()
    assert [failed(made, float(n)) for n in range(7)] == [False, False, True] * 2 + [False]


@pytest.mark.parametrize("end", [BROKEN, REFUSED, LOADING])
def test_it_does_not_matter_how_they_end_it(end: ClaimEnd) -> None:
    made = claim()
    assert [failed(made, float(n), end) for n in range(3)] == [False, False, True]


def test_a_result_or_an_idle_end_clears_them() -> None:
    for end_well in ("result", "idle"):
        made = claim()
        failed(made, 0.0)
        failed(made, 1.0)
        made.attached(2.0)
        if end_well == "result":
            made.received_result()
        assert not made.ended(BROKEN, 3.0, 1 if end_well == "result" else 0).give_up_requests
        assert [failed(made, 4.0 + n) for n in range(3)] == [False, False, True]


def test_a_rival_and_a_failed_attempt_say_nothing_about_the_requests() -> None:
    made = claim()
    failed(made, 0.0)
    failed(made, 1.0)
    assert not failed(made, 2.0, CONTESTED)
    assert not made.ended(UNREACHABLE, 3.0, 1).give_up_requests
    assert failed(made, 4.0), "the third that failed"


def test_delays_are_drawn_from_the_upper_half() -> None:
    draws: Iterator[float] = iter((0.0, 0.5, 1.0, 0.0, 0.0))
    backoff = Backoff(1.0, 4.0, lambda: next(draws))
    assert [backoff.next() for _ in range(4)] == [0.5, 1.5, 4.0, 2.0]
    backoff.reset()
    assert backoff.next() == 0.5
