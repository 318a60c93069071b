"""When a failed call is tried again, and after how long. Pure: clock and jitter are handed in.

Every RPC of the service may be repeated without harm, so the one thing to keep is that a caller
never sees a token twice: a generation that has begun is resumed behind what has come of it. Waiting
helps against only two kinds of failure: no server answered, or one refused and said when to come
back.

A call that was never answered is tried a few times. One that a server had taken up is worth more:
its server is restarted, or another takes its place, and that may take a while.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twinplane.errors import Overloaded, TwinplaneError, Unavailable

_LONGEST_PAUSE = 0.25
"""Seconds between attempts to resume, where the server asks for no more."""
_MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds of trying again. `RetryPolicy(max_attempts=1)` never does.

    The n-th wait is drawn from [0, initial_backoff * 2^(n - 1)] seconds, and is never shorter than
    the server asked for. A wait above `max_backoff`, or past the call's deadline, is not waited:
    the error goes to the caller at once.

    For a call that broke after a server had taken it up, `resume_patience` is what counts: seconds
    after which it is given up when no server goes on with it.
    """

    max_attempts: int = 4
    initial_backoff: float = 0.2
    max_backoff: float = 10.0
    resume_patience: float = 60.0

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise ValueError("max_attempts must be at least 1")
        if self.initial_backoff < 0 or self.max_backoff < 0:
            raise ValueError("backoffs must not be negative")
        if self.resume_patience < 0:
            raise ValueError("resume_patience must not be negative")


class Attempts:
    """The attempts of one call, which all have `timeout` seconds together.

    `clock` gives monotonic seconds, `jitter` numbers in [0, 1).
    """

    def __init__(
        self,
        policy: RetryPolicy,
        timeout: float | None,
        clock: Callable[[], float],
        jitter: Callable[[], float],
    ) -> None:
        self.timeout = timeout
        self._policy = policy
        self._clock = clock
        self._jitter = jitter
        self._failed_count = 0
        self._broken_at: float | None = None
        """When what a server had taken up broke; None: nothing has, or it went on."""
        self._deadline = None if timeout is None else clock() + timeout

    def remaining(self) -> float | None:
        """Seconds left for the next attempt; None without a deadline."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def went_on(self) -> None:
        """A server has taken the call up, again or for the first time."""
        self._broken_at = None
        self._failed_count = 0

    def wait_to_resume(self, error: TwinplaneError) -> float | None:
        """Notes that a call which a server had taken up broke, or could not be resumed.

        Returns the seconds to wait before it is tried; None: it is given up.
        """
        now = self._clock()
        if self._broken_at is None:
            self._broken_at, self._failed_count = now, 0
        self._failed_count += 1
        if not _is_safe(error):
            return None
        backoff = self._policy.initial_backoff * 2 ** min(self._failed_count - 1, _MAX_DOUBLINGS)
        pause = min(backoff, _LONGEST_PAUSE) * self._jitter()
        wait: float = max(error.retry_after or 0.0, pause)
        left = self._broken_at + self._policy.resume_patience - now
        remaining = self.remaining()
        if wait >= left or (remaining is not None and wait >= remaining):
            return None
        return wait

    @property
    def is_resuming(self) -> bool:
        """Whether it broke after a server had taken it up."""
        return self._broken_at is not None

    def wait_after(self, error: TwinplaneError) -> float | None:
        """Notes a failed attempt. Returns the seconds to wait before the next; None: no next."""
        self._failed_count += 1
        if self._failed_count >= self._policy.max_attempts or not _is_safe(error):
            return None
        backoff = self._policy.initial_backoff * 2 ** (self._failed_count - 1) * self._jitter()
        wait: float = max(error.retry_after or 0.0, min(backoff, self._policy.max_backoff))
        remaining = self.remaining()
        if wait > self._policy.max_backoff or (remaining is not None and wait >= remaining):
            return None
        return wait


def _is_safe(error: TwinplaneError) -> bool:
    match error:
        case Unavailable():
            return True
        case Overloaded():
            return error.retry_after is not None
        case _:
            return False
