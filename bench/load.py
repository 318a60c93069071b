"""What a load is and what its clients saw, the same for ours and for the peers."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients saw: rates per second over the whole run, median times in seconds."""

    output_tokens_per_second: float
    total_tokens_per_second: float
    first_token_seconds: float
    between_tokens_seconds: float


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts that share no prefix, so that no cache helps."""
    draw = random.Random(seed)
    return [[draw.randrange(100, vocabulary) for _ in range(length)] for _ in range(count)]


def rates(
    prompts: Sequence[list[int]],
    output_tokens: int,
    wall: float,
    stamps: Sequence[Sequence[float]],
) -> Load:
    """From the seconds of the whole run, and each request's from its start to its messages."""
    output = len(prompts) * output_tokens
    between = [(each[-1] - each[0]) / max(1, output_tokens - 1) for each in stamps]
    return Load(
        output_tokens_per_second=output / wall,
        total_tokens_per_second=(output + sum(map(len, prompts))) / wall,
        first_token_seconds=statistics.median(each[0] for each in stamps),
        between_tokens_seconds=statistics.median(between),
    )
