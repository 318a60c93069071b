"""Where a new request goes, by what is known of each replica."""

from __future__ import annotations

import itertools

import pytest

from control_plane.core.placement import Load, order


def at(replica: int, attached: bool, waiting: int, free_kv_tokens: int) -> Load:
    return Load(replica, attached, waiting, free_kv_tokens, room=1, retry_after=1.0)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (at(1, True, 9, 0), at(0, False, 0, 999)),
        (at(1, True, 2, 0), at(0, True, 3, 999)),
        (at(1, True, 2, 65), at(0, True, 2, 64)),
        (at(0, True, 2, 64), at(1, True, 2, 64)),
        (at(1, False, 0, 0), at(0, False, 1, 99)),
    ],
    ids=["attached", "fewer wait", "more free KV", "the smaller number", "while all are lost"],
)
def test_the_better_place_comes_first(better: Load, worse: Load) -> None:
    first_then_second = [better.replica, worse.replica]
    assert order([better, worse]) == order([worse, better]) == first_then_second


def test_the_order_does_not_depend_on_the_order_of_the_snapshot() -> None:
    loads = [at(0, True, 1, 8), at(1, False, 0, 8), at(2, True, 0, 8), at(3, True, 0, 9)]
    for shuffled in itertools.permutations(loads):
        assert order(shuffled) == [3, 2, 0, 1]


def test_nowhere() -> None:
    assert order([]) == []
