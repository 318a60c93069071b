"""When a step that is not answered is overdue: told by what such steps have taken. Pure.

A worker's process may answer while its device hangs. Nothing but the step it does not finish shows
that, and a long step must not look like it.

What a step takes is taken to be a sum: something for the step, and something for each row, each
token and each position that is attended to. Nobody needs to know these prices. A step that took
`s` seconds bounds every other one: if that has at most k times as much of each (k at least 1), it
takes at most k * s. Each kind of step that was seen gives such a bound, and the least of them
counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import mul

from control_plane.core.plan import Message, SamplePlan

LEAST_SECONDS = 2.75
"""No step is overdue before. Together with the moving of its sequences: three seconds."""
TIMES = 5
"""What is more than so many times what such a step takes is overdue."""
FIRST_SECONDS = 30.0
"""While nothing is known of a worker: its first step may compile, or read weights from a disk."""
FIRST_SECONDS_OF_TOKEN = 0.1
LONGEST_FACTOR = 8
"""As long as no step is answered, claim after claim, the limit doubles up to so many times."""
_NOISE = 1.5
"""How much more than its bound a step may take before the bound is wrong."""
_KIND_COUNT = 64
"""How many kinds of steps are remembered: those that were seen last."""
_QUICK_SECONDS = 0.05
_SAMPLED = 16
"""Of steps that take less, one in so many is remembered, and each of the first: they are so far
from overdue that to look at all of them is not worth what it costs."""
_FADING = 0.9
"""Of a kind's longest step, with each shorter one."""


@dataclass(frozen=True, slots=True)
class Work:
    """How much a step has of everything that costs time.

    `attended_count`: positions, each counted once for every token that attends to it.
    """

    row_count: int
    token_count: int
    attended_count: int

    @property
    def kind(self) -> tuple[int, int, int]:
        """What steps of much the same size have in common."""
        return (
            self.row_count.bit_length(),
            self.token_count.bit_length(),
            self.attended_count.bit_length(),
        )

    def times(self, other: Work) -> float:
        """How many times as much it has as another one, of what it has most; at least 1."""
        return max(
            1.0,
            _ratio(self.row_count, other.row_count),
            _ratio(self.token_count, other.token_count),
            _ratio(self.attended_count, other.attended_count),
        )

    def least(self, other: Work) -> Work:
        """The smaller of the two, of each."""
        return Work(
            min(self.row_count, other.row_count),
            min(self.token_count, other.token_count),
            min(self.attended_count, other.attended_count),
        )


def work_of(message: Message) -> Work:
    """What a message asks of the worker."""
    if isinstance(message, SamplePlan):
        return Work(len(message.rows), 0, 0)
    columns = message.scheduled
    starts, counts = columns.start_positions, columns.token_counts
    row_count, token_count = len(starts), sum(counts)
    if token_count == row_count:
        attended_count = sum(starts) + row_count
    else:
        attended_count = sum(map(mul, starts, counts)) + sum(map(mul, counts, counts))
    return Work(row_count, token_count, attended_count)


class Progress:
    """The steps of one worker: what they took, and which are still to be answered.

    `now` is in seconds of a monotonic clock.
    """

    def __init__(self) -> None:
        self._open: deque[tuple[Message, float]] = deque()
        """What is not answered yet, and when it was sent."""
        self._stage_count = 1
        self._began = 0.0
        """When the oldest of them began, as far as is known: everything before it was answered."""
        self._seen: dict[tuple[int, int, int], tuple[Work, float]] = {}
        """Of each kind, a step's work and seconds; the kind that was seen last is last."""
        self._factor = 1
        self._answer_count = 0
        """In this life of the worker."""

    def attached(self, *, same_life: bool, stage_count: int = 1) -> None:
        """A claim begins, with nothing in flight. Another life of the worker is not known yet. It
        works on `stage_count` messages at once, as the stages of a pipeline do.
        """
        self._stage_count = stage_count
        if self._open and not self._seen:
            self._factor = min(self._factor * 2, LONGEST_FACTOR)
        if not same_life:
            self._seen.clear()
            self._answer_count = 0
        self._open.clear()

    def sent(self, message: Message, now: float) -> None:
        """A message goes to the worker, which answers messages one after another."""
        if not self._open:
            self._began = now
        self._open.append((message, now))

    def answered(self, now: float, executed_seconds: float = 0.0) -> None:
        """The oldest message was answered; by the worker's own clock it took so long."""
        if not self._open:
            return  # somebody else will find out that there was nothing to answer
        (message, sent), seconds = self._open.popleft(), max(now - self._began, executed_seconds)
        if self._stage_count > 1:  # what it took by itself, while answers came more often than that
            seconds = max(seconds, min(now - sent, seconds * self._stage_count))
        self._answer_count += 1
        if (
            seconds > _QUICK_SECONDS
            or self._answer_count <= _KIND_COUNT
            or not self._answer_count % _SAMPLED
        ):
            self._learn(work_of(message), seconds)
        self._began = now
        self._factor = 1

    def stopped(self, seconds: float, now: float) -> None:
        """This process was stopped for so long. What the worker did meanwhile is still unread."""
        self._began = min(self._began + seconds, now)

    def waited(self, now: float) -> float:
        """For how long the oldest message has been with the worker; 0 when there is none."""
        return now - self._began if self._open else 0.0

    def limit(self) -> float:
        """How long the oldest message may take; infinite when there is none."""
        if not self._open:
            return math.inf
        work = work_of(self._open[0][0])
        seconds = min(self._bounds(work), default=math.inf)
        if seconds == math.inf:
            return (FIRST_SECONDS + FIRST_SECONDS_OF_TOKEN * work.token_count) * self._factor
        return max(LEAST_SECONDS, TIMES * seconds)

    def _bounds(self, work: Work) -> Iterator[float]:
        for seen, seconds in self._seen.values():
            yield work.times(seen) * seconds

    def _learn(self, work: Work, seconds: float) -> None:
        """Notes what a step took, and forgets bounds that it has disproved: the worker is slower.

        One that took longer than others of its kind fades, so that a single stall does not hide a
        hang for ever.
        """
        if seconds > LEAST_SECONDS / TIMES:  # below, limits do not depend on it
            self._seen = {
                kind: own
                for kind, own in self._seen.items()
                if work.times(own[0]) * own[1] * _NOISE >= seconds
            }
        known = self._seen.pop(work.kind, None)
        if known is not None and known[1] * _FADING > seconds:
            work, seconds = known[0].least(work), known[1] * _FADING
        self._seen[work.kind] = work, seconds
        if len(self._seen) > _KIND_COUNT:
            del self._seen[next(iter(self._seen))]


def _ratio(count: int, other: int) -> float:
    """How many times as much the first is; infinite where the other has nothing of it."""
    if other:
        return count / other
    return math.inf if count else 0.0
