"""Where a request goes, by what is known of each replica."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core.placement import Leads, Load, order
from tests.support.quick import examples

SLACK = 100


def at(
    replica: int, *, attached: bool = True, starts: bool = True, backlog: int = 0, running: int = 0,
    free: int = 99, cached: int = 0, lead: int = 0,
) -> Load:  # fmt: skip
    return Load(replica, attached, starts, backlog, running, free, cached, lead)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (at(1, starts=False, backlog=9, free=0), at(0, attached=False)),
        (at(1, running=9, free=2), at(0, starts=False, cached=1000)),
        (at(1, starts=False, backlog=2), at(0, starts=False, backlog=3)),
        (at(1, cached=64, running=3), at(0)),
        (at(1), at(0, cached=64, running=5)),
        (at(1, backlog=63, cached=64), at(0)),
        (at(1, lead=-1), at(0, backlog=64, cached=64)),
        (at(1, starts=False, backlog=8, cached=16), at(0, starts=False, backlog=4)),
        (at(1, running=1, free=1), at(0, running=2)),
        (at(1, cached=16, lead=SLACK), at(0, lead=-SLACK)),
        (at(1, cached=16, lead=SLACK + 15), at(0)),
        (at(1), at(0, cached=16, lead=SLACK + 17)),
        (at(1, lead=-SLACK - 17), at(0, cached=16)),
        (at(1, lead=-2), at(0, lead=-1, free=100)),
        (at(1, starts=False, backlog=1, lead=900), at(0, starts=False, backlog=2, lead=-900)),
        (at(1, free=65), at(0, free=64)),
        (at(0), at(1)),
        (at(1, attached=False, backlog=0), at(0, attached=False, backlog=1)),
    ],
    ids=[
        "attached", "starts at once", "fewer wait", "has the prefix", "enough run where it is",
        "has more than is to be computed there", "does not have more than that",
        "has more than waits there", "fewer run", "a lead within the slack",
        "a lead that saves more", "a lead that saves less", "a lag that is worth more",
        "lags most", "a queue tells of load, a lead doesn't", "more free KV", "the smaller number",
        "while all are lost",
    ],
)  # fmt: skip
def test_the_better_place_comes_first(better: Load, worse: Load) -> None:
    first_then_second = [better.replica, worse.replica]
    assert order([better, worse], SLACK) == first_then_second
    assert order([worse, better], SLACK) == first_then_second


def test_the_order_does_not_depend_on_the_order_of_the_snapshot() -> None:
    loads = [at(0, backlog=1), at(1, attached=False), at(2), at(3, free=100)]
    for shuffled in itertools.permutations(loads):
        assert order(shuffled) == [3, 2, 0, 1]


def test_nowhere() -> None:
    assert order([]) == []


tokens = st.integers(0, 400)
load_values = st.builds(
    Load,
    replica=st.just(0),
    attached=st.booleans(),
    starts=st.booleans(),
    backlog_token_count=tokens,
    running=st.integers(0, 8),
    free_kv_tokens=tokens,
    cached_token_count=tokens,
    lead_token_count=st.integers(-400, 400),
)
snapshots = st.lists(load_values, min_size=1, max_size=8).map(
    lambda loads: [replace(load, replica=number) for number, load in enumerate(loads)]
)


@settings(max_examples=examples(300), deadline=None)
@given(loads=snapshots, randomly=st.randoms(use_true_random=False))
def test_any_shuffle_gives_one_order_of_all(loads: list[Load], randomly: object) -> None:
    shuffled = list(loads)
    randomly.shuffle(shuffled)  # type: ignore[attr-defined]
    found = order(loads, SLACK)
    assert order(shuffled, SLACK) == found
    assert sorted(found) == [load.replica for load in loads]
    ranked = [loads[number] for number in found]
    assert ranked == sorted(ranked, key=lambda load: (not load.attached, not load.starts))


@settings(max_examples=examples(300), deadline=None)
@given(loads=snapshots, saved=st.integers(0, 400), relief=st.integers(0, 400))
def test_who_is_first_stays_first_when_it_gets_better(
    loads: list[Load], saved: int, relief: int
) -> None:
    """No choice is undone by what made it: a longer prefix there, or less to do there."""
    first = order(loads, SLACK)[0]
    chosen = loads[first]
    for better in (
        replace(chosen, cached_token_count=chosen.cached_token_count + saved),
        replace(chosen, backlog_token_count=max(0, chosen.backlog_token_count - relief)),
        replace(chosen, lead_token_count=chosen.lead_token_count - relief),
        replace(chosen, free_kv_tokens=chosen.free_kv_tokens + relief),
    ):
        changed = [*loads[:first], better, *loads[first + 1 :]]
        assert order(changed, SLACK)[0] == first


@settings(max_examples=examples(300), deadline=None)
@given(cached=st.integers(1, 400), more=tokens, behind=st.integers(-SLACK, SLACK), starts=...)
def test_affinity_holds_until_the_imbalance_exceeds_what_it_saves(
    cached: int, more: int, behind: int, starts: bool
) -> None:
    holder = at(1, starts=starts, backlog=more, cached=cached)
    other = at(0, starts=starts, lead=behind)
    if more != cached:
        assert (order([holder, other], SLACK)[0] == 1) == (more < cached)


# --- requests one after another -------------------------------------------------------------------


def serve(replicas: int, requests: list[tuple[int, int, int]], slack: int) -> list[int]:
    """Tokens that each of some replicas computed. A request is a prefix, its length, and the rest.

    The naive model: a request is over before the next comes, and no cache forgets anything.
    """
    leads, computed = Leads(), [0] * replicas
    known: list[set[int]] = [set() for _ in range(replicas)]
    for prefix, length, rest in requests:
        lead = leads.update(dict(enumerate(computed)), reach=10_000)
        loads = [
            at(number, cached=length * (prefix in known[number]), lead=lead[number])
            for number in range(replicas)
        ]
        chosen = order(loads, slack)[0]
        computed[chosen] += rest + length * (prefix not in known[chosen])
        known[chosen].add(prefix)
    return computed


@settings(max_examples=examples(100), deadline=None)
@given(
    replicas=st.integers(1, 12),
    length=st.integers(0, 300),
    requests=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60)), max_size=150),
)
def test_nobody_is_far_ahead_of_the_mean(
    replicas: int, length: int, requests: list[tuple[int, int]]
) -> None:
    computed = serve(replicas, [(prefix, length, rest) for prefix, rest in requests], SLACK)
    mean = sum(computed) / replicas
    bound = 2 * SLACK + 2 * length + 60
    assert max(computed) - mean <= bound
    assert mean - min(computed) <= bound


def test_a_hot_prefix_spreads_and_is_computed_once_on_each() -> None:
    computed = serve(8, [(0, 300, 10)] * 2_000, SLACK)
    assert sum(computed) == 2_000 * 10 + 8 * 300
    assert min(computed) > 0
    assert max(computed) - min(computed) <= 2 * SLACK + 300


def test_a_rare_prefix_stays_where_it_is() -> None:
    """Its requests are too few to put its replica ahead."""
    others = [(1 + number % 40, 100, 10) for number in range(2_000)]
    rare = [(0, 300, 10) if number % 50 == 0 else other for number, other in enumerate(others)]
    assert sum(serve(8, rare, 400)) <= sum(serve(8, others, 400)) + 3 * 300


def test_no_replica_starves_at_low_load() -> None:
    """Requests that share nothing, each over before the next comes."""
    computed = serve(7, [(number, 0, 30) for number in range(70)], SLACK)
    assert computed == [300] * 7


# --- leads ----------------------------------------------------------------------------------------


def test_one_that_joins_starts_at_the_mean() -> None:
    leads = Leads()
    leads.update({0: 0, 1: 0}, reach=1_000)
    assert leads.update({0: 100, 1: 300, 2: 5_000}, reach=1_000) == {0: -100, 1: 100, 2: 0}


def test_one_that_was_away_has_not_much_to_catch_up_with() -> None:
    leads = Leads()
    totals = {0: 0, 1: 0, 2: 0}
    for _ in range(100):
        totals = {0: totals[0] + 500, 1: totals[1] + 500, 2: 0}
        found = leads.update(totals, reach=1_000)
    assert found[2] == -1_000


def test_whoever_left_is_forgotten() -> None:
    leads = Leads()
    leads.update({0: 0, 1: 0}, reach=1_000)
    leads.update({0: 0, 1: 900}, reach=1_000)
    leads.update({0: 0}, reach=1_000)
    assert leads.update({0: 0, 1: 900}, reach=1_000)[1] == 0
    assert leads.update({}, reach=1_000) == {}


@settings(max_examples=examples(100), deadline=None)
@given(
    steps=st.lists(
        st.dictionaries(st.integers(0, 4), st.integers(0, 5_000), min_size=1), max_size=30
    ),
    reach=st.integers(1, 3_000),
)
def test_leads_are_bounded_and_fair(steps: list[dict[int, int]], reach: int) -> None:
    leads, totals = Leads(), dict[int, int]()
    for step in steps:
        totals = {number: totals.get(number, 0) + grown for number, grown in step.items()}
        found = leads.update(totals, reach)
        assert found.keys() == totals.keys()
        assert all(abs(lead) <= reach for lead in found.values())
        again = leads.update(totals, 10 * reach)
        ranked = sorted(found, key=found.__getitem__)
        assert ranked == sorted(again, key=lambda number: (again[number], ranked.index(number)))
