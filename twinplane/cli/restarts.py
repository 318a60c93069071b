"""When a plane that died is started again, and when it is given up. Pure.

never served ──served──▶ alive ──death──▶ wait ──delay──▶ alive …
     │                                     │
   death                        several short lives in a row
     ▼                                     ▼
  given up                              given up
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How often and how fast a plane is started again. Times in seconds.

    A life that served for less than `short_life` is a short one. The first delay is `first_delay`;
    each short life doubles it, up to `longest_delay`, and a longer life starts over. After
    `max_short_lives` in a row the plane is given up.
    """

    first_delay: float = 0.5
    longest_delay: float = 10.0
    short_life: float = 30.0
    max_short_lives: int = 5


@dataclass(frozen=True, slots=True)
class Lives:
    """What the lives of a plane have been so far: whether any served, and the short ones since."""

    policy: RestartPolicy
    has_served: bool = False
    short_lives: int = 0

    def after(self, served_seconds: float | None) -> Lives:
        """The record with one more life, which served for so long; None: it never served."""
        is_short = served_seconds is None or served_seconds < self.policy.short_life
        return Lives(
            self.policy,
            self.has_served or served_seconds is not None,
            self.short_lives + 1 if is_short else 0,
        )

    @property
    def are_over(self) -> bool:
        """Whether the plane is given up: it never came up at all, or dies again and again."""
        return not self.has_served or self.short_lives >= self.policy.max_short_lives

    @property
    def delay(self) -> float:
        """Seconds until the plane is started again."""
        doublings = max(0, self.short_lives - 1)
        return min(self.policy.first_delay * 2.0**doublings, self.policy.longest_delay)

    def why_over(self) -> str:
        """Why it is given up, as the end of a sentence; empty for a plane that never came up."""
        if not self.has_served:
            return ""
        return (
            f"given up, since {self.short_lives} lives in a row served for less than "
            f"{self.policy.short_life:g} s"
        )
