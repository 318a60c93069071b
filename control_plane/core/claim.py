"""The life of one controller's claim on one worker: events in, verdicts out. Pure.

States, and the events that lead from one to another:

                    attached                ended
    NEVER_ATTACHED ──────────▶ ATTACHED ──────────────▶ LOST
                                  ▲  ▲    attached       │
                                  │  └───────────────────┤
                                  │                      │ patience ends
                                  │       attached       ▼
                                  └─────────────────── GONE

An ATTACHED worker that says that it `leaves` is LEAVING until the claim has ended. `ended` is also
told of an attempt to attach that failed; that leaves the state as it is. While a worker is LOST,
its requests wait. Once it is GONE they fail and new ones are refused, but the attempts to attach go
on.
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
    LEAVING = 3
    LOST = 4
    GONE = 5


class EndKind(Enum):
    """Why a claim, or an attempt to make one, has ended."""

    UNREACHABLE = "unreachable"
    """No connection, or the connection broke."""
    SILENT = "silent"
    """The connection looks whole, but the worker gives no sign of life."""
    HUNG = "hung"
    """The worker gives signs of life, and does not finish a step."""
    LOADING = "loading"
    """The worker is there and still loads its model."""
    DRAINING = "draining"
    """The worker finishes what it has and takes nothing more."""
    CONTESTED = "contested"
    """Another controller has claimed the worker."""
    ELSEWHERE = "elsewhere"
    """The worker serves this controller already, as another replica."""
    REFUSED = "refused"
    """Anything else: the worker refused a message, or it can't be used, or broke the contract."""


DISCONNECTING = (EndKind.UNREACHABLE, EndKind.SILENT, EndKind.HUNG)
"""The worker may be as it was, and its KV too, when it is claimed again."""
FINAL = (EndKind.SILENT, EndKind.HUNG, EndKind.DRAINING, EndKind.ELSEWHERE)
"""The worker is not to be expected back within a moment."""
_ACCUSING = (*DISCONNECTING, EndKind.REFUSED)


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

    `retry_after`: seconds until the next attempt. `accuses_inflight`: what was in flight may have
    brought the end about, see suspicion.py.
    """

    retry_after: float
    loudness: Loudness
    accuses_inflight: bool = False


@dataclass(frozen=True, slots=True)
class ClaimPolicy:
    """How a controller behaves towards its worker. Times in seconds.

    A loss shorter than `loss_patience` is only a pause; after it requests fail and new ones are
    refused until a worker is back. Until the first claim, a worker that loads or can't be reached
    yet is asked every `starting_delay`; retries after a loss start at `first_retry_delay` and
    double up to `longest_retry_delay`, until a claim has lasted longer than that.
    `contention_delay` is the first wait after another controller claimed the worker; it doubles up
    to `longest_contention_delay` and starts over once a claim has lasted longer than that. A
    request can kill a worker: one that was in flight at `max_failed_claims` ends of claims, without
    progress in between, is ended.
    """

    loss_patience: float = 60.0
    silence_limit: float = 2.4
    """A claimed worker without a sign of life for so long is lost, since the last sign."""
    starting_delay: float = 0.1
    first_retry_delay: float = 0.05
    longest_retry_delay: float = 2.0
    contention_delay: float = 10.0
    longest_contention_delay: float = 120.0
    reminder: float = 60.0
    """A cause that keeps the worker away is told again after so long."""
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
        self._is_leaving = False
        self._told_causes: dict[str, float] = {}
        """When each was told last."""

    @property
    def is_attached(self) -> bool:
        """Whether the worker is claimed now."""
        return self._attached_at is not None

    def state(self, now: float) -> ClaimState:
        """Where the claim stands at `now`."""
        if self._attached_at is not None:
            return ClaimState.LEAVING if self._is_leaving else ClaimState.ATTACHED
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
        self._told_causes.clear()

    @property
    def is_leaving(self) -> bool:
        """Whether the worker is claimed now, and is about to end."""
        return self._is_leaving

    def leaves(self) -> None:
        """The worker says that it will end soon, and goes on until then."""
        assert self._attached_at is not None, "no claim"
        self._is_leaving = True

    def ended(self, end: ClaimEnd, now: float) -> Verdict:
        """The claim is over, or an attempt to make one has failed."""
        self._is_leaving = False
        before_first_claim = self._attached_at is None and self._lost_at is None
        was_attached = self._attached_at is not None
        if self._attached_at is not None:
            lasted = now - self._attached_at
            if lasted > self._policy.longest_contention_delay:
                self._contention.reset()
            # Results alone prove nothing: a plan may end each claim some steps after its start.
            if lasted > self._policy.longest_retry_delay:
                self._retry.reset()
            self._attached_at = None
            self._lost_at = now - end.seconds_ago
        return Verdict(
            retry_after=self._delay(end.kind, before_first_claim),
            loudness=self._loudness(end, was_attached, now),
            accuses_inflight=was_attached and end.kind in _ACCUSING,
        )

    def _delay(self, kind: EndKind, before_first_claim: bool) -> float:
        """Seconds until the next attempt."""
        if kind is EndKind.CONTESTED:
            return self._contention.next()
        if before_first_claim and kind not in (EndKind.REFUSED, EndKind.ELSEWHERE):
            # Clients wait for this worker to come up: whatever is added here, they wait longer.
            return self._policy.starting_delay
        return self._retry.next()

    def _loudness(self, end: ClaimEnd, was_attached: bool, now: float) -> Loudness:
        """While there is no worker, each cause is told once, and again whenever it has lasted."""
        told_at = self._told_causes.get(end.cause)
        if was_attached or end.kind is EndKind.CONTESTED:
            self._told_causes[end.cause] = now
            return Loudness.WARNING
        if told_at is not None and now - told_at < self._policy.reminder:
            return Loudness.SILENT
        if told_at is not None and end.kind is EndKind.ELSEWHERE:
            return Loudness.SILENT  # nothing is amiss
        self._told_causes[end.cause] = now
        if told_at is not None and end.kind is EndKind.UNREACHABLE:
            return Loudness.WARNING
        # What does not pass by waiting is somebody's to mend.
        return Loudness.WARNING if end.kind is EndKind.REFUSED else Loudness.INFO
