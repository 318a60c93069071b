"""When a plane is started again: lives in, delays out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinplane.cli.restarts import Lives, RestartPolicy

POLICY = RestartPolicy(first_delay=1.0, longest_delay=6.0, short_life=30.0, max_short_lives=5)
OVER = "over"


def verdicts(policy: RestartPolicy, lives: list[float | None]) -> list[float | str]:
    """The delay after each life, or that the plane is given up; nothing follows that."""
    record, told = Lives(policy), []
    for served in lives:
        record = record.after(served)
        told.append(OVER if record.are_over else record.delay)
    return told


@pytest.mark.parametrize(
    ("lives", "expected"),
    [
        ([None], [OVER]),
        ([0.0], [1.0]),
        ([29.9, 29.9, 29.9, 29.9, 29.9], [1.0, 2.0, 4.0, 6.0, OVER]),
        ([30.0], [1.0]),
        ([1e6, 1e6, 1e6, 1e6, 1e6, 1e6], [1.0] * 6),
        ([1.0, 1.0, 31.0, 1.0, 1.0], [1.0, 2.0, 1.0, 1.0, 2.0]),
        # It came up once; then its device is still taken, or its model's file is gone.
        ([100.0, None, None, None], [1.0, 1.0, 2.0, 4.0]),
        ([100.0, None, None, None, None, None], [1.0, 1.0, 2.0, 4.0, 6.0, OVER]),
        ([5.0, None, None, 60.0, None], [1.0, 2.0, 4.0, 1.0, 1.0]),
    ],
)
def test_each_life_has_its_verdict(lives: list[float | None], expected: list[float | str]) -> None:
    assert verdicts(POLICY, lives) == expected


def test_why_it_is_given_up() -> None:
    assert Lives(POLICY).after(None).why_over() == "", "its failure says all there is to say"
    record = Lives(POLICY)
    for _ in range(5):
        record = record.after(2.0)
    assert record.why_over() == ("given up, since 5 lives in a row served for less than 30 s")


@given(
    st.builds(
        RestartPolicy,
        first_delay=st.floats(0.01, 5),
        longest_delay=st.floats(5, 60),
        short_life=st.floats(1, 100),
        max_short_lives=st.integers(1, 9),
    ),
    st.lists(st.none() | st.floats(0, 1e9), min_size=1, max_size=40),
)
def test_no_delay_is_out_of_range_and_only_short_lives_end_it(
    policy: RestartPolicy, lives: list[float | None]
) -> None:
    record = Lives(policy)
    for number, served in enumerate(lives):
        record = record.after(served)
        assert policy.first_delay <= record.delay <= policy.longest_delay
        short = [s is None or s < policy.short_life for s in lives[: number + 1]]
        trailing = next((n for n, was in enumerate(reversed(short)) if not was), len(short))
        assert record.short_lives == trailing
        never = all(s is None for s in lives[: number + 1])
        assert record.are_over == (never or trailing >= policy.max_short_lives)
