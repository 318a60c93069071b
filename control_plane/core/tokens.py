"""A chunk of tokens, with whatever else is known of each of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import TypeVar

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The most likely tokens at one position, best first: ids and their log probabilities."""

    ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class Tokens:
    """Token ids in order, and columns parallel to them. None: nobody asked for the column.

    A value: whoever has one does not change it. It is not frozen only for what that costs: every
    row of every step makes one.
    """

    ids: list[int]
    logprobs: list[float] | None = None
    """Natural log of each token's probability."""
    ranks: list[int] | None = None
    """Each token's place among all tokens by probability; 1 is the most likely."""
    top: list[TopTokens] | None = None
    """The most likely tokens at each token's position."""
    weight_generations: list[int] | None = None
    """Generation of the weights that sampled each token."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_plain(self) -> bool:
        """Whether there is nothing but ids."""
        return (
            self.logprobs is None
            and self.ranks is None
            and self.top is None
            and self.weight_generations is None
        )

    def part(self, start: int, end: int) -> Tokens:
        """The tokens [start, end)."""
        return Tokens(
            self.ids[start:end],
            None if self.logprobs is None else self.logprobs[start:end],
            None if self.ranks is None else self.ranks[start:end],
            None if self.top is None else self.top[start:end],
            None if self.weight_generations is None else self.weight_generations[start:end],
        )

    def head(self, count: int) -> Tokens:
        """The first `count` tokens."""
        return self if count >= len(self.ids) else self.part(0, count)

    def split(self, counts: Sequence[int]) -> list[Tokens]:
        """Consecutive chunks of these lengths, which add up to all tokens."""
        return [self.part(start, end) for start, end in pairwise(accumulate(counts, initial=0))]

    def singles(self) -> list[Tokens]:
        """A chunk for each token."""
        if self.is_plain:
            return [Tokens([token]) for token in self.ids]
        return self.split([1] * len(self.ids))

    @staticmethod
    def joined(chunks: Sequence[Tokens]) -> Tokens:
        """One chunk of all, in order. Chunks that are not empty must have the same columns."""
        chunks = [chunk for chunk in chunks if chunk.ids]
        if len(chunks) < 2:
            return chunks[0] if chunks else Tokens([])
        return Tokens(
            list(chain.from_iterable(chunk.ids for chunk in chunks)),
            _joined([chunk.logprobs for chunk in chunks]),
            _joined([chunk.ranks for chunk in chunks]),
            _joined([chunk.top for chunk in chunks]),
            _joined([chunk.weight_generations for chunk in chunks]),
        )

    @property
    def is_parallel(self) -> bool:
        """Whether every column is as long as `ids`."""
        if self.is_plain:
            return True
        columns = (self.logprobs, self.ranks, self.top, self.weight_generations)
        return all(column is None or len(column) == len(self.ids) for column in columns)


def _joined(columns: list[list[_Value] | None]) -> list[_Value] | None:
    present = [column for column in columns if column is not None]
    if not present:
        return None
    assert len(present) == len(columns), "chunks with different columns"
    return list(chain.from_iterable(present))
