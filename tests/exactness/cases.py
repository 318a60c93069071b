"""The 256 requests of the exactness matrix: the golden prompts, and made ones that sit on edges.

Everything about a request is a fixed function of its number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from control_plane.core.request import SamplingParams
from tests.golden.references import load_references

BLOCK_SIZE = 16
COUNT = 256

_SAMPLING = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.3, min_p=0.02),
    SamplingParams(temperature=0.9, top_k=200, top_p=0.95, min_p=0.001),
)


@dataclass(frozen=True, slots=True)
class Case:
    """One request. Its seed is no other's, so a draw's seed and position name it."""

    number: int
    prompt: tuple[int, ...]

    @property
    def seed(self) -> int:
        return self.number + 1

    @property
    def sampling(self) -> SamplingParams:
        return _SAMPLING[self.number % len(_SAMPLING)]


def make_cases(vocabulary_size: int) -> list[Case]:
    """All of them, in order of number. Token ids are folded into the vocabulary."""
    prompts = [*_golden(), *_block_edges(), *_shared_prefixes(), *_shuffled_blocks(), *_any()]
    assert len(prompts) == COUNT
    return [
        Case(number, tuple(token % vocabulary_size for token in prompt))
        for number, prompt in enumerate(prompts)
    ]


def some_of(cases: list[Case], count: int, start: int = 0) -> list[Case]:
    """`count` of the cases, or all when there are fewer: evenly spread, from the `start`th on."""
    count = min(count, len(cases))
    return [cases[(start + index * len(cases) // count) % len(cases)] for index in range(count)]


def _golden() -> list[list[int]]:
    return [list(reference.prompt) for reference in load_references()]


def _block_edges() -> list[list[int]]:
    """Lengths at, just before and just behind a multiple of the block size; and single tokens."""
    rng = random.Random(1)
    edges = [BLOCK_SIZE * blocks + off for blocks in range(1, 9) for off in (-1, 0, 1)]
    return [_tokens(rng, length) for length in [*edges, *edges, *[1] * 8]]


def _shared_prefixes() -> list[list[int]]:
    """Ten families of eight that part from one another at, before and behind block edges."""
    rng = random.Random(2)
    prompts: list[list[int]] = []
    for family in range(10):
        trunk = _tokens(rng, 96)
        prompts += [
            trunk[:cut] + _tokens(rng, rng.choice((0, 1, 15, 16, 20)))
            for cut in (16, 17, 31, 32, 33, 48, 64 + family, 96)
        ]
    return prompts


def _shuffled_blocks() -> list[list[int]]:
    """Equal blocks behind other ones: the same tokens, not the same KV."""
    rng = random.Random(4)
    blocks = {name: _tokens(rng, BLOCK_SIZE) for name in "ABC"}
    orders = (
        "A", "B", "AA", "AB", "BA", "CA", "CB", "AAA", "ABA", "ABC", "ACB", "BAC", "BCA", "CAB",
        "CBA", "AAAA",
    )  # fmt: skip
    return [[token for name in order for token in blocks[name]] + [1] for order in orders]


def _any() -> list[list[int]]:
    rng = random.Random(3)
    return [_tokens(rng, rng.randint(2, 150)) for _ in range(40)]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(49152) for _ in range(count)]
