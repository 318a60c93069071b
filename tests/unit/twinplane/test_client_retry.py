"""The retry rules alone, under a clock that only the test moves."""

from __future__ import annotations

import pytest

from twinplane import Overloaded, RetryPolicy, Unavailable
from twinplane.client.retry import Attempts


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts(policy: RetryPolicy, timeout: float | None, clock: Clock, jitter: float) -> Attempts:
    return Attempts(policy, timeout, clock, lambda: jitter)


def test_one_deadline_spans_all_attempts() -> None:
    clock = Clock()
    tries = attempts(RetryPolicy(initial_backoff=1.0), 10.0, clock, 0.5)
    assert tries.remaining() == 10.0
    clock.now += 4.0
    assert tries.remaining() == 6.0
    assert tries.wait_after(Unavailable("")) == 0.5
    clock.now += 5.5
    assert tries.remaining() == 0.5
    assert tries.wait_after(Unavailable("")) is None, "the wait would pass the deadline"
    clock.now += 9.0
    assert tries.remaining() == 0.0


def test_backoff_doubles_up_to_its_bound() -> None:
    policy = RetryPolicy(max_attempts=6, initial_backoff=1.0, max_backoff=5.0)
    tries = attempts(policy, None, Clock(), 1.0)
    waits = [tries.wait_after(Unavailable("")) for _ in range(6)]
    assert waits == [1.0, 2.0, 4.0, 5.0, 5.0, None]


def test_the_servers_delay_is_a_floor_not_a_value() -> None:
    tries = attempts(RetryPolicy(initial_backoff=4.0), None, Clock(), 1.0)
    assert tries.wait_after(Overloaded("", retry_after=3.0)) == 4.0
    tries = attempts(RetryPolicy(initial_backoff=4.0), None, Clock(), 0.0)
    assert tries.wait_after(Overloaded("", retry_after=3.0)) == 3.0
    assert tries.wait_after(Overloaded("", retry_after=0.0)) == 0.0


@pytest.mark.parametrize(
    "wrong", [{"max_attempts": 0}, {"initial_backoff": -1.0}, {"max_backoff": -0.1}]
)
def test_a_policy_that_means_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]
