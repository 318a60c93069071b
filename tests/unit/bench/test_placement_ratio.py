"""What bench/placement.py measures, small: the ratios that must hold, and what the oracle knows."""

from __future__ import annotations

from array import array

import pytest

from bench.fleet_in_time import Run, at_random, ours
from bench.placement import LEAST_OF_MEAN, LEAST_OF_ORACLE, MOST_OF_MEAN, shape_of
from bench.shared_prefixes import Oracle, Trace


@pytest.mark.parametrize(("replicas", "load"), [(1, 0.7), (4, 0.3), (8, 0.7), (4, 1.5)])
def test_placement_keeps_its_bounds(replicas: int, load: float) -> None:
    outcome = Run(replicas, ours(), load, 120 * replicas, shape_of(replicas)).outcome()
    assert outcome.of_oracle >= LEAST_OF_ORACLE
    assert outcome.most <= MOST_OF_MEAN
    assert outcome.least >= LEAST_OF_MEAN


def test_it_beats_chance() -> None:
    placed, drawn = (
        Run(4, policy(), 0.7, 240, shape_of(4)).outcome() for policy in (ours, at_random)
    )
    assert placed.hit_tokens > 1.2 * drawn.hit_tokens
    assert sum(placed.computed) < sum(drawn.computed)


def test_one_replica_hits_what_the_oracle_does() -> None:
    outcome = Run(1, ours(), 0.1, 60, shape_of(1)).outcome()
    assert outcome.of_oracle == pytest.approx(1.0, abs=0.02)


def test_equal_seeds_give_equal_conversations() -> None:
    logs = []
    for _ in range(2):
        made = Trace(shape_of(2), seed=3).conversations()
        logs.append([next(made).ask(number, 0.0).prompt_token_ids for number in range(20)])
    assert logs[0] == logs[1]


def test_the_oracle_counts_whole_blocks_that_were_there() -> None:
    oracle = Oracle(block_size=4)
    first = array("I", range(10))
    assert oracle.hits(first) == 0
    assert oracle.hits(first) == 8
    assert oracle.hits(array("I", [*range(4), 99, *range(5, 10)])) == 4
    assert oracle.hits(array("I", range(4))) == 0, "a prompt's last token is always computed"
    oracle.learn(array("I", range(20)))
    assert oracle.hits(array("I", range(20))) == 16
