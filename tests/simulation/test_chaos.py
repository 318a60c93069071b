"""Whole systems under whatever may happen to them; a seed replays a run.

`python -m tests.simulation --first 17 --seeds 1` plays seed 17 and shows the shortest run that
fails, if it does. `make simulate` plays as many seeds as there is time for.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest

from control_plane.core.events import FinishReason
from control_plane.shell.moves import Mover
from tests.simulation import scenario as events
from tests.simulation import shrink
from tests.simulation.scenario import draw
from tests.simulation.world import Outcome, play
from tests.support.quick import spread

SEEDS = range(200)
EVERY = 5
"""`make check` plays every fifth seed."""


@pytest.fixture(autouse=True)
def silence() -> Iterator[None]:
    """Each run logs hundreds of losses."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@cache
def outcome(seed: int) -> Outcome:
    """A seed's run, which several tests look at."""
    return play(draw(seed))


@pytest.mark.parametrize("seed", spread(SEEDS, len(SEEDS) // EVERY))
def test_chaos_loses_nothing(seed: int) -> None:
    try:
        outcome(seed)
    except BaseException:
        failure = shrink.first_failure(seed)
        pytest.fail("fails only now and then" if failure is None else failure.report())


def test_the_seeds_reach_what_they_should() -> None:
    """A simulation in which nothing goes wrong proves nothing."""
    runs = [outcome(seed) for seed in SEEDS[::EVERY]]
    counts: Counter[str] = sum((run.counts for run in runs), Counter())
    for event in events.Event.__args__:
        assert counts[event.__name__] >= 2, event
    for what in ("attaches", "preemptions", "moves"):
        assert counts[what] > len(runs) // 2, what
    finishes = [answer.finish for run in runs for answer in run.answers.values()]
    reasons = {finish.reason for finish in finishes if finish is not None}
    elsewhere = {
        FinishReason.DEADLINE,
        FinishReason.WEIGHTS_CHANGED,
        FinishReason.ADAPTER_UNAVAILABLE,
    }
    assert reasons == set(FinishReason) - elsewhere
    hits = [finish.usage.cached_prompt_tokens for finish in finishes if finish is not None]
    assert sum(hits) > 0
    assert sum(answer.resume_count for run in runs for answer in run.answers.values()) > 5
    used = [sum(map(bool, run.placed)) for run in runs]
    assert sum(count > 1 for count in used) > len(runs) // 3, "one worker has it all"


@pytest.mark.parametrize("seed", spread(range(400, 410), 3))
def test_a_seed_replays(seed: int) -> None:
    first, second = play(draw(seed)), play(draw(seed))
    assert first.ended_at == second.ended_at
    assert first.counts == second.counts
    for name, answer in first.answers.items():
        assert answer.tokens == second.answers[name].tokens


@pytest.mark.parametrize("seed", spread(range(100, 120), 4))
def test_sync_and_async_give_the_same_tokens(seed: int) -> None:
    """Where no client leaves; one that does is cut at another token."""
    drawn = draw(seed, worker_count=1)
    runs = [play(replace(drawn, synchronous=mode)) for mode in (False, True)]
    for name, answer in runs[0].answers.items():
        other = runs[1].answers[name]
        finishes = (answer.finish, other.finish)
        ended = (FinishReason.LENGTH, FinishReason.STOP)
        if all(finish is not None and finish.reason in ended for finish in finishes):
            assert answer.tokens == other.tokens


def test_a_planted_bug_is_found_and_told_in_few_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody carries off what a lost worker had: the report names the seed and little else."""
    monkeypatch.setattr(Mover, "evacuate", lambda self, replica: None)
    failures = (shrink.failure_of(draw(seed)) for seed in range(60))
    found = next(failure for failure in failures if failure is not None)
    short = shrink.shortest(found, most_replays=60)
    assert len(short.scenario.events) <= max(3, len(found.scenario.events) // 2)
    assert f"seed {found.scenario.seed}" in short.report()
    again = shrink.failure_of(short.scenario)
    assert again is not None and again.what == short.what
