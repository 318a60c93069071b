"""Every way in which the same request can be served, and a sample in which all pairs of them occur.

Values only: `serving` serves in these ways.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from tests.exactness.cases import BLOCK_SIZE, Case

WHOLE = 1024
"""A step's budget that no prompt exceeds."""

_SHORT = 2 * BLOCK_SIZE + 1
_MEDIUM = 4 * BLOCK_SIZE
FEW_TOKENS = 8
MANY_TOKENS = 40
"""Output that crosses two block edges: sequences outgrow what they start with."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One way to serve: `streams` at once, in order or `shuffled`, at most `chunk` tokens a step.

    `cached`: with a prefix cache, filled before; else with none. `preempted`: the pool is too small
    for all streams. `asynchronous`: plans are made ahead of results. `threads`: of the device.
    """

    threads: int = 2
    streams: int = 1
    shuffled: bool = False
    chunk: int = WHOLE
    cached: bool = False
    preempted: bool = False
    asynchronous: bool = False

    def __str__(self) -> str:
        chunk = "whole" if self.chunk == WHOLE else str(self.chunk)
        words = (
            f"threads-{self.threads}",
            f"streams-{self.streams}",
            "shuffled" if self.shuffled else "in-order",
            f"chunk-{chunk}",
            "cached" if self.cached else "cold",
            "preempted" if self.preempted else "roomy",
            "async" if self.asynchronous else "sync",
        )
        return "-".join(words)

    @property
    def token_count(self) -> int:
        """Tokens to generate for each request."""
        return MANY_TOKENS if self.preempted else FEW_TOKENS

    @property
    def block_count(self) -> int | None:
        """Blocks of the pool, the null block included; None: as many as the worker has.

        Few: what one of the longest sequences needs, and one more for every two streams.
        """
        if not self.preempted:
            return None
        return 1 + -(-(_MEDIUM + MANY_TOKENS) // BLOCK_SIZE) + self.streams // 2

    def suits(self, case: Case) -> bool:
        """Whether this way can serve the case in reasonable time and space."""
        if self.chunk == 1:
            return len(case.prompt) <= _SHORT and case.number % 3 == 0
        return len(case.prompt) <= (_MEDIUM if self.preempted else WHOLE)


CANONICAL = Configuration()
"""One at a time, whole, cold, plan by plan: what every other way must equal."""


def every_configuration() -> list[Configuration]:
    """The whole product, less what has no meaning, by threads.

    One stream has nobody to make room for, and without a cache no order. With one token a step the
    first stream takes every step, so nobody grows at another's cost.
    """
    product = itertools.product(
        (2, 1),
        (1, 2, 8, 32),
        (False, True),
        (1, 16, 64, WHOLE),
        (False, True),
        (False, True),
        (False, True),
    )
    configurations = (Configuration(*values) for values in product)
    return [c for c in configurations if c != CANONICAL and _has_meaning(c)]


def covering(configurations: Sequence[Configuration]) -> list[Configuration]:
    """A few of them, in their order, in which every two values occur together that do in all."""
    # Where several add as much, chance decides, else the plainest would be taken each time.
    candidates = random.Random(1).sample(configurations, len(configurations))
    missing = set[tuple[object, ...]]().union(*map(_pairs, candidates))
    chosen: list[Configuration] = []
    while missing:
        best = max(candidates, key=lambda c: len(_pairs(c) & missing))
        missing -= _pairs(best)
        chosen.append(best)
    return sorted(chosen, key=configurations.index)


def _has_meaning(configuration: Configuration) -> bool:
    if configuration.streams == 1 and (configuration.preempted or configuration.shuffled):
        return configuration.cached and not configuration.preempted
    return not (configuration.preempted and configuration.chunk == 1)


def _pairs(configuration: Configuration) -> set[tuple[object, ...]]:
    values = enumerate(dataclasses.astuple(configuration))
    return set(itertools.combinations(values, 2))
