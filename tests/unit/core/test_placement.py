"""Where a request goes, by what is known of each replica."""

from __future__ import annotations

import itertools

import pytest

from control_plane.core.placement import Load, order


def at(
    replica: int, *, attached: bool = True, starts: bool = True, waiting: int = 0, running: int = 0,
    free: int = 99, cached: int = 0,
) -> Load:  # fmt: skip
    return Load(replica, attached, starts, waiting, running, free, cached)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (at(1, starts=False, waiting=9, free=0), at(0, attached=False)),
        (at(1, running=9, free=2), at(0, starts=False, cached=16)),
        (at(1, starts=False, waiting=2), at(0, starts=False, waiting=3)),
        (at(1, cached=16, running=3), at(0, cached=0)),
        (at(1, starts=False, waiting=8, cached=16), at(0, starts=False, waiting=4)),
        (at(1, running=1, free=1), at(0, running=2)),
        (at(1, free=65), at(0, free=64)),
        (at(0), at(1)),
        (at(1, attached=False, waiting=0), at(0, attached=False, waiting=1)),
    ],
    ids=[
        "attached", "starts at once", "fewer wait", "has the prefix", "has more than waits there",
        "fewer run", "more free KV", "the smaller number", "while all are lost",
    ],
)  # fmt: skip
def test_the_better_place_comes_first(better: Load, worse: Load) -> None:
    first_then_second = [better.replica, worse.replica]
    assert order([better, worse]) == order([worse, better]) == first_then_second


def test_the_order_does_not_depend_on_the_order_of_the_snapshot() -> None:
    loads = [at(0, waiting=1), at(1, attached=False), at(2), at(3, free=100)]
    for shuffled in itertools.permutations(loads):
        assert order(shuffled) == [3, 2, 0, 1]


def test_nowhere() -> None:
    assert order([]) == []
