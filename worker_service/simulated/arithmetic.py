"""The simulated model: what a token writes to the KV, and which token follows from the KV.

All values are uint64 and wrap around.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from worker_service.domain.columns import IntColumn

Words = npt.NDArray[np.uint64]


def mix(token_ids: IntColumn, positions: IntColumn, salt: int = 0) -> Words:
    """What a token at a position writes to the KV, uint64 [tokens]. `salt` is the weights'."""
    places = (token_ids.astype(np.uint64) << np.uint64(32)) | positions.astype(np.uint64)
    return scramble(places ^ np.uint64(salt))


def adapter_word(digest: str | None) -> int:
    """What an adapter's hex digest changes in everything that is written to the KV: no bit without
    an adapter."""
    return int(digest[:16], 16) if digest else 0


def position_weights(positions: Words) -> Words:
    """Odd factors that make a sum depend on the order of what is added up."""
    return positions * np.uint64(2) + np.uint64(1)


def preferences(sums: Words, seeds: Words, positions: Words) -> Words:
    """A hash in place of logits, uint64 [n]. It depends on the weighted sum of the KV before a
    position, on the seed (0: greedy), and on the position."""
    return scramble(sums ^ scramble(seeds ^ scramble(positions)))


def choose(words: Words, vocabulary_size: int, first_token: int = 0) -> IntColumn:
    """The tokens that preferences stand for, int32 [n]: none is below `first_token`."""
    count = np.uint64(vocabulary_size - first_token)
    return (words % count).astype(np.int32) + np.int32(first_token)


def scramble(values: Words) -> Words:
    """SplitMix64's output function (Steele, Lea, Flood: Fast splittable pseudorandom numbers)."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
