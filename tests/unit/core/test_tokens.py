"""Chunks of tokens: their columns go wherever their ids go."""

from __future__ import annotations

import pytest

from control_plane.core.tokens import Tokens, TopTokens

TOPS = [TopTokens([token, 9], [-0.5, -1.0]) for token in range(4)]
FULL = Tokens([5, 6, 7, 8], [-0.1, -0.2, -0.3, -0.4], [1, 2, 3, 4], TOPS, [1, 1, 2, 2])


def test_a_part_takes_its_part_of_every_column() -> None:
    part = FULL.part(1, 3)
    assert part == Tokens([6, 7], [-0.2, -0.3], [2, 3], TOPS[1:3], [1, 2])
    assert FULL.head(2) == FULL.part(0, 2) and len(FULL.head(2)) == 2
    assert FULL.head(4) is FULL and FULL.head(9) is FULL
    assert Tokens([5, 6]).head(1) == Tokens([5])


def test_split_and_joined_are_each_others_reverse() -> None:
    chunks = FULL.split([1, 2, 1])
    assert [chunk.ids for chunk in chunks] == [[5], [6, 7], [8]]
    assert Tokens.joined(chunks) == FULL
    assert FULL.singles() == FULL.split([1, 1, 1, 1])
    assert Tokens([5, 6]).singles() == [Tokens([5]), Tokens([6])]


def test_nothing_joined_is_nothing_and_one_is_itself() -> None:
    assert Tokens.joined([]) == Tokens([]) == Tokens.joined([Tokens([])])
    assert Tokens.joined([Tokens([]), FULL]) is FULL
    assert Tokens.joined([FULL, Tokens([]), FULL]).ids == [5, 6, 7, 8, 5, 6, 7, 8]


def test_chunks_with_different_columns_are_not_joined() -> None:
    with pytest.raises(AssertionError):
        Tokens.joined([Tokens([1]), Tokens([2], [-0.5])])


@pytest.mark.parametrize(
    "odd",
    [
        Tokens([1, 2], [-0.1]),
        Tokens([1, 2], None, [1, 2, 3]),
        Tokens([1], None, None, []),
        Tokens([], None, None, None, [1]),
    ],
)
def test_columns_of_another_length_are_seen(odd: Tokens) -> None:
    assert not odd.is_parallel and not odd.is_plain
    assert FULL.is_parallel and not FULL.is_plain
    assert Tokens([1, 2]).is_parallel and Tokens([1, 2]).is_plain
