"""Sequences in the order of their ranks: who waits for a row, and who has one.

The rank is the priority, lowered by the time waited (see sequence.rank_of). A preempted sequence
comes back with the rank it had, hence before everybody who came later with its priority.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from control_plane.core.sequence import Rank, Sequence

_rank = attrgetter("rank")


class RankedList:
    """Sequences sorted by rank. Ranks are distinct; changes cost one short move of pointers."""

    def __init__(self) -> None:
        self.items: list[Sequence] = []
        """Sorted; for reading only."""
        self.prompt_token_count = 0
        """Of all of them."""
        self.missing_token_count = 0
        """Of all of them, as each was when it was added."""

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.items)

    def add(self, sequence: Sequence) -> None:
        insort(self.items, sequence, key=_rank)
        self.prompt_token_count += sequence.prompt_count
        self.missing_token_count += sequence.missing

    def remove(self, sequence: Sequence) -> None:
        """Takes out a sequence that is there."""
        rank: Rank = sequence.rank
        index = bisect_left(self.items, rank, key=_rank)
        assert self.items[index] is sequence, "not in the list"
        del self.items[index]
        self.prompt_token_count -= sequence.prompt_count
        self.missing_token_count -= sequence.missing

    def reorder(self) -> None:
        """Sorts again, after ranks have changed."""
        self.items.sort(key=_rank)

    @property
    def first(self) -> Sequence:
        return self.items[0]

    @property
    def first_begun(self) -> Sequence | None:
        """The first that has tokens."""
        return next((sequence for sequence in self.items if sequence.completion_count), None)

    @property
    def last(self) -> Sequence:
        return self.items[-1]
