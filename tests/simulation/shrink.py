"""Plays seeds, and finds the shortest run that still fails by leaving events out."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass, replace

from tests.simulation.scenario import Scenario, Timed, draw
from tests.simulation.virtual_time import Deadlock
from tests.simulation.world import play

MOST_REPLAYS = 400


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong in a scenario, in a line and with where."""

    scenario: Scenario
    what: str
    trace: str

    def report(self) -> str:
        """All that is needed to play it again."""
        return "\n".join(
            [
                f"seed {self.scenario.seed}: {self.what}",
                f"to play it again: python -m tests.simulation --first {self.scenario.seed}",
                f"the shortest run found, {len(self.scenario.events)} events:",
                *(f"  {line}" for line in self.scenario.lines()),
                self.trace,
            ]
        )


def failure_of(played: Scenario) -> Failure | None:
    """What goes wrong in a scenario; None: nothing."""
    try:
        play(played)
    except (Exception, Deadlock, BaseExceptionGroup) as error:
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, KeyboardInterrupt | asyncio.CancelledError):
            raise
        what = f"{type(first).__name__}: {first}"
        return Failure(played, what, "".join(traceback.format_exception(first)[-4:]))
    return None


def shortest(failure: Failure, most_replays: int = MOST_REPLAYS) -> Failure:
    """A scenario that fails with as few events as could be found, and with as few workers.

    Leaves out halves, then quarters, and so on down to single events.
    """
    left = most_replays

    def fails(played: Scenario) -> bool:
        nonlocal failure, left
        left -= 1
        if (found := failure_of(played)) is not None:
            failure = found
        return found is not None

    size = max(1, len(failure.scenario.events) // 2)
    while True:
        was_shorter = False
        start = 0
        while left > 0 and start < len(failure.scenario.events):
            events: list[Timed] = list(failure.scenario.events)
            if fails(failure.scenario.with_events(events[:start] + events[start + size :])):
                was_shorter = True
            else:
                start += size
        if left <= 0 or (size == 1 and not was_shorter):
            break
        size = max(1, size // 2)
    while left > 0 and len(failure.scenario.specs) > 1:
        if not fails(replace(failure.scenario, specs=failure.scenario.specs[:-1])):
            break
    return failure


def first_failure(seed: int) -> Failure | None:
    """The shortest failing run of a seed; None: it passes."""
    failure = failure_of(draw(seed))
    return None if failure is None else shortest(failure)
