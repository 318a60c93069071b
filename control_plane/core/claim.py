"""The life of one controller's claim on one worker: events in, verdicts out. Pure.

States, and the events that lead from one to another:

                    attached                ended
    NEVER_ATTACHED ──────────▶ ATTACHED ──────────────▶ LOST
                                  ▲  ▲    attached       │
                                  │  └───────────────────┤
                                  │                      │ patience ends
                                  │       attached       ▼
                                  └─────────────────── GONE

`ended` is also told of an attempt to attach that failed; that leaves the state as it is. While a
worker is LOST, its requests wait. Once it is GONE they fail and new ones are refused, but the
attempts to attach go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

Jitter = Callable[[], float]
"""Draws uniformly from [0, 1)."""


class ClaimState(Enum):
    """Where the claim stands."""

    NEVER_ATTACHED = 1
    ATTACHED = 2
    LOST = 3
    GONE = 4


class EndKind(Enum):
    """Why a claim, or an attempt to make one, has ended."""

    UNREACHABLE = "unreachable"
    """No connection, or the connection broke."""
    LOADING = "loading"
    """The worker is there and still loads its model."""
    CONTESTED = "contested"
    """Another controller has claimed the worker."""
    REFUSED = "refused"
    """Anything else: the worker refused a message, or it can't be used, or broke the contract."""


@dataclass(frozen=True, slots=True)
class ClaimEnd:
    """The end of a claim or of an attempt. `cause` says it in words; equal causes are told once.

    `seconds_ago`: how long before it was noticed, for a worker that has fallen silent.
    """

    kind: EndKind
    cause: str
    seconds_ago: float = 0.0


class Loudness(Enum):
    """How the end should be logged."""

    SILENT = 1
    INFO = 2
    WARNING = 3


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to do after the end of a claim or of an attempt.

    `retry_after`: seconds until the next attempt. `give_up_requests`: what runs has ended several
    claims in a row and must fail, or it would end all that follow.
    """

    retry_after: float
    loudness: Loudness
    give_up_requests: bool = False


@dataclass(frozen=True, slots=True)
class ClaimPolicy:
    """How a controller behaves towards its worker. Times in seconds.

    A loss shorter than `loss_patience` is only a pause; after it requests fail and new ones are
    refused until a worker is back. Until the first claim, a worker that loads or can't be reached
    yet is asked every `starting_delay`; retries after a loss start at `first_retry_delay` and
    double up to `longest_retry_delay`. `contention_delay` is the first wait after another
    controller claimed the worker; it doubles up to `longest_contention_delay` and starts over once
    a claim has lasted longer than that. A request can kill a worker: after `max_failed_claims`
    claims in a row that ended with plans in flight and without a single result, the requests that
    run are given up.
    """

    loss_patience: float = 60.0
    silence_limit: float = 3.5
    """A claimed worker without a sign of life for so long is lost, since the last sign."""
    starting_delay: float = 0.1
    first_retry_delay: float = 0.05
    longest_retry_delay: float = 2.0
    contention_delay: float = 10.0
    longest_contention_delay: float = 120.0
    max_failed_claims: int = 5


class Backoff:
    """Delays in seconds that double from `first` to `longest`.

    Each is drawn from the upper half of its range, so that controllers that lost the same worker at
    the same moment do not come back together.
    """

    def __init__(self, first: float, longest: float, jitter: Jitter) -> None:
        self._first = first
        self._longest = longest
        self._jitter = jitter
        self._next = first

    def reset(self) -> None:
        """Makes the next delay the first again."""
        self._next = self._first

    def next(self) -> float:
        """The delay before the next attempt."""
        delay = self._next
        self._next = min(delay * 2, self._longest)
        return delay * (0.5 + self._jitter() / 2)


class Claim:
    """One worker's claim. Every method runs to completion at once and takes the time from outside.

    `now` is in seconds of a monotonic clock. `jitter` spreads the delays between attempts.
    """

    def __init__(self, policy: ClaimPolicy, jitter: Jitter) -> None:
        self._policy = policy
        self._retry = Backoff(policy.first_retry_delay, policy.longest_retry_delay, jitter)
        self._contention = Backoff(policy.contention_delay, policy.longest_contention_delay, jitter)
        self._attached_at: float | None = None
        self._lost_at: float | None = None
        self._has_result = False
        self._failed_claims = 0
        self._told_causes: set[str] = set()

    @property
    def is_attached(self) -> bool:
        """Whether the worker is claimed now."""
        return self._attached_at is not None

    def state(self, now: float) -> ClaimState:
        """Where the claim stands at `now`."""
        if self._attached_at is not None:
            return ClaimState.ATTACHED
        if self._lost_at is None:
            return ClaimState.NEVER_ATTACHED
        return ClaimState.LOST if self.patience_left(now) > 0 else ClaimState.GONE

    def patience_left(self, now: float) -> float:
        """Seconds until a lost worker is gone, 0 when it is; infinite when nothing was lost."""
        if self._lost_at is None:
            return math.inf
        return max(0.0, self._lost_at + self._policy.loss_patience - now)

    def lost_seconds(self, now: float) -> float:
        """For how long the worker has been lost or gone; 0 when it is not."""
        return 0.0 if self._lost_at is None else now - self._lost_at

    def attached(self, now: float) -> None:
        """The worker was claimed."""
        assert self._attached_at is None, "claimed twice"
        self._attached_at = now
        self._lost_at = None
        self._has_result = False
        self._told_causes.clear()

    def received_result(self) -> None:
        """The worker has executed a step: it is good, whatever came before."""
        self._has_result = True
        self._retry.reset()

    def ended(self, end: ClaimEnd, now: float, inflight_count: int) -> Verdict:
        """The claim is over, or an attempt to make one has failed.

        `inflight_count`: plans that were sent and not answered.
        """
        before_first_claim = self._attached_at is None and self._lost_at is None
        was_attached = self._attached_at is not None
        give_up = False
        if self._attached_at is not None:
            if now - self._attached_at > self._policy.longest_contention_delay:
                self._contention.reset()
            self._attached_at = None
            self._lost_at = now - end.seconds_ago
            if end.kind is not EndKind.CONTESTED:
                give_up = self._is_poisoned(inflight_count)
        return Verdict(
            retry_after=self._delay(end.kind, before_first_claim),
            loudness=self._loudness(end, was_attached),
            give_up_requests=give_up,
        )

    def _delay(self, kind: EndKind, before_first_claim: bool) -> float:
        """Seconds until the next attempt."""
        if kind is EndKind.CONTESTED:
            return self._contention.next()
        if before_first_claim and kind is not EndKind.REFUSED:
            # Clients wait for this worker to come up: whatever is added here, they wait longer.
            return self._policy.starting_delay
        return self._retry.next()

    def _loudness(self, end: ClaimEnd, was_attached: bool) -> Loudness:
        """While there is no worker, each cause is told once, however often it is met."""
        if was_attached or end.kind is EndKind.CONTESTED:
            self._told_causes.add(end.cause)
            return Loudness.WARNING
        if end.cause in self._told_causes:
            return Loudness.SILENT
        self._told_causes.add(end.cause)
        return Loudness.INFO

    def _is_poisoned(self, inflight_count: int) -> bool:
        """Counts claims in a row that ended with plans in flight and without a single result."""
        if self._has_result or not inflight_count:
            self._failed_claims = 0
            return False
        self._failed_claims += 1
        if self._failed_claims < self._policy.max_failed_claims:
            return False
        self._failed_claims = 0
        return True
