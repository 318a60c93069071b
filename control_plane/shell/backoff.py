"""How long to wait before claiming a worker again: bounded, growing, jittered."""

from __future__ import annotations

import random


class Backoff:
    """Delays in seconds that double from `first` to `longest`.

    Each is drawn from the upper half of its range, so that controllers that lost the same worker at
    the same moment do not come back together.
    """

    def __init__(self, first: float, longest: float, rng: random.Random) -> None:
        self._first = first
        self._longest = longest
        self._rng = rng
        self._next = first

    def reset(self) -> None:
        """The last attempt was good: the next delay is the first again."""
        self._next = self._first

    def next(self) -> float:
        """The delay before the next attempt."""
        delay = self._next
        self._next = min(delay * 2, self._longest)
        return delay * (0.5 + self._rng.random() / 2)
