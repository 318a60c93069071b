"""Which addresses of a list are one replica: by what the workers there have told."""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from typing import Any, cast

import pytest

from control_plane.shell.grouping import Grouped, grouped
from control_plane.shell.membership import Membership
from control_plane.shell.ports import RankCoordinates, Worker
from control_plane.shell.replica import Replica
from tests.support.quick import spread
from tests.unit.shell.test_membership import Scripted, port_of, told


def rank(tensor: int, stage: int, sizes: tuple[int, int] = (2, 1), data: int = 0) -> Any:
    return RankCoordinates((tensor, sizes[0]), (stage, sizes[1]), (data, 2))


ALONE = RankCoordinates()
FIRST, SECOND = rank(0, 0), rank(1, 0)


@pytest.mark.parametrize(
    ("places", "serving", "answered", "expected"),
    [
        ({}, [], [], Grouped(("a", "b", "c"))),
        ({"a": ALONE, "b": ALONE, "c": ALONE}, [], "abc", Grouped(("a", "b", "c"))),
        ({"a": ALONE}, ["b"], "a", Grouped(("b", "a", "c"))),
        # In their order, whatever that of the addresses.
        ({"a": SECOND, "c": FIRST, "b": ALONE}, [], "abc", Grouped(("c,a", "b"))),
        # Who has told nothing may be one of them.
        ({"a": SECOND, "c": FIRST}, [], "ac", Grouped(("c,a",), ("b",))),
        ({"a": ALONE, "c": FIRST}, [], "ac", Grouped(("a",), ("c", "b"), (f"{SECOND} of",))),
        # Others of the same place: who answers comes before who did once, and who serves stays.
        ({"a": FIRST, "b": SECOND, "c": SECOND}, [], "ac", Grouped(("a,c",), ("b",))),
        ({"a": FIRST, "b": SECOND, "c": SECOND}, [], "a", Grouped(("a,b",), ("c",))),
        ({"a": FIRST, "b": SECOND, "c": SECOND}, ["a,b"], "c", Grouped(("a,b",), ("c",))),
        # A rank that serves and is no longer listed takes its replica along.
        ({"a": FIRST, "c": SECOND}, ["a,x"], "c", Grouped(("a,c",), ("b",))),
        # Different sizes, and ranks of different replicas, never belong together.
        ({"a": FIRST, "b": rank(1, 0, (2, 2))}, [], "ab", Grouped((), ("a", "b", "c"))),
        ({"a": FIRST, "b": rank(1, 0, data=1)}, [], "ab", Grouped((), ("a", "b", "c"))),
    ],
)
def test_who_belongs_together(
    places: dict[str, RankCoordinates], serving: list[str], answered: str, expected: Grouped
) -> None:
    found = grouped(["a", "b", "c"], places, serving=serving, answered=answered)
    assert found.replicas == expected.replicas
    assert sorted(found.waiting) == sorted(expected.waiting)
    for text in expected.missing:
        assert any(one.startswith(text) for one in found.missing)


def test_lines_that_name_all_ranks_are_as_they_are() -> None:
    found = grouped(["b,a", "c", "d"], {"c": SECOND, "d": FIRST}, answered=["c", "d"])
    assert found == Grouped(("d,c", "b,a"))
    assert grouped(["b,a", "c"], {}, serving=["b,a"]) == Grouped(("b,a", "c"))


def test_replicas_of_one_data_parallel_rank_stay_together() -> None:
    """As the groups of a LeaderWorkerSet, which all have the first: who does not answer for once
    costs no other its place."""
    places = {"a": FIRST, "b": FIRST, "c": SECOND, "d": SECOND}
    first = grouped("abcd", places, answered="abcd")
    assert first.replicas == ("a,c", "b,d")
    for there in ("", "ab", "abd", "d", "cd"):
        assert grouped("abcd", places, joined=["a,d", "b,c"], answered=there).replicas == (
            "a,d",
            "b,c",
        )
    places["e"] = SECOND
    found = grouped("abcde", places, joined=["a,d", "b,c"], answered="abde")
    assert (found.replicas, found.waiting) == (("a,d", "b,e"), ("c",))


def test_a_worker_that_says_it_is_one_of_very_many_costs_nothing() -> None:
    found = grouped(["a"], {"a": rank(0, 0, (2**31, 2**31))}, answered=["a"])
    assert (found.replicas, found.waiting) == ((), ("a",))
    assert len(found.missing) == 8


@pytest.mark.parametrize("seed", spread(range(200), 50))
def test_every_address_is_in_one_place(seed: int) -> None:
    """Fleets of all sizes, some of whose ranks are away, never came or are double."""
    chance = random.Random(seed)
    sizes = (chance.randint(1, 3), chance.randint(1, 3))
    places: dict[str, RankCoordinates] = {}
    for data in range(chance.randint(1, 4)):
        for stage in range(sizes[1]):
            for tensor in range(sizes[0]):
                for _ in range(chance.choice((0, 1, 1, 1, 1, 1, 2))):
                    address = f"h{chance.randrange(10**6)}:1"
                    places[address] = RankCoordinates(
                        (tensor, sizes[0]), (stage, sizes[1]), (data, 4)
                    )
    listed = chance.sample(sorted(places), len(places))
    known = {one: place for one, place in places.items() if chance.random() < 0.9}
    first = grouped(listed, known, answered=known)
    serving = [one for one in first.replicas if chance.random() < 0.5]
    for found in (first, grouped(listed, known, serving=serving, answered=known)):
        addresses = [address for one in found.replicas for address in one.split(",")]
        assert sorted([*addresses, *found.waiting]) == sorted(listed)
        assert set(serving) <= set(found.replicas) or found is first
        for replica in found.replicas:
            members = [known.get(address, ALONE) for address in replica.split(",")]
            if len(members) > 1:
                assert len({member.data for member in members}) == 1
                assert len(members) == sizes[0] * sizes[1]
                seats = [(member.pipeline[0], member.tensor[0]) for member in members]
                assert seats == sorted(set(seats))
        # Nobody waits who could have joined: per data-parallel rank, some place is exhausted.
        for data in {known[one].data for one in found.waiting if one in known}:
            left = {known[one] for one in found.waiting if one in known and known[one].data == data}
            assert len(left) < sizes[0] * sizes[1]
    assert set(first.replicas) == set(
        grouped(listed, known, serving=first.replicas, answered=()).replicas
    )


# --- the lists ----------------------------------------------------------------------------------


@dataclass(eq=False)
class FakeReplica:
    address: str
    attached: bool = False


class FakeFleet:
    """Who is there."""

    def __init__(self) -> None:
        self.present: dict[str, FakeReplica] = {}

    def join(self, worker: Worker, address: str = "") -> Replica:
        self.present[address] = FakeReplica(address)
        return cast("Replica", self.present[address])

    def leave(self, replica: Replica) -> None:
        del self.present[cast("FakeReplica", replica).address]

    def attach_all(self) -> None:
        for replica in self.present.values():
            replica.attached = True


class Workers:
    """What is to be asked."""

    def __init__(self) -> None:
        self.places: dict[str, RankCoordinates] = {}
        self.asked: list[str] = []

    async def ask(self, address: str) -> RankCoordinates | None:
        self.asked.append(address)
        return self.places.get(address)


def test_a_list_of_ranks_joins_as_they_come(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    listed, fleet, workers = Scripted("dns", ("a:1", "b:1", "c:1", "d:1")), FakeFleet(), Workers()
    members = Membership(fleet, port_of, (), [listed], ask=workers.ask)

    def look() -> set[str]:
        workers.asked.clear()
        asyncio.run(members.look(listed))
        return set(fleet.present)

    workers.places = {"c:1": FIRST}
    for _ in range(3):
        assert look() == set()
    [waiting] = told(caplog, "ranks wait for others of their replica")
    assert waiting["source"] == "dns" and set(waiting["waiting"].split()) == set(listed.now)
    assert waiting["missing"] == f"{SECOND} of data-parallel rank 0"
    workers.places["b:1"] = SECOND
    assert look() == {"c:1,b:1"}
    fleet.attach_all()
    workers.places |= {"a:1": rank(1, 0, data=1), "d:1": rank(0, 0, data=1)}
    assert look() == {"c:1,b:1", "d:1,a:1"}
    assert sorted(workers.asked) == ["a:1", "d:1"], "who serves is not asked"
    fleet.attach_all()
    # One is lost, and still listed: it is waited for, though it answers nothing now.
    fleet.present["c:1,b:1"].attached = False
    del workers.places["b:1"]
    assert look() == {"c:1,b:1", "d:1,a:1"}
    # Its place is taken by one at another address.
    listed.now = ("a:1", "b:1", "c:1", "d:1", "e:1")
    workers.places["e:1"] = SECOND
    assert look() == {"c:1,e:1", "d:1,a:1"}
    # A list that can't be read, or nobody who answers, changes nothing.
    workers.places.clear()
    assert look() == {"c:1,e:1", "d:1,a:1"}
    # Two replicas have exchanged ranks at their addresses: the next look finds out.
    for replica in fleet.present.values():
        replica.attached = False
    workers.places = {
        "a:1": SECOND,
        "c:1": FIRST,
        "d:1": rank(0, 0, data=1),
        "e:1": rank(1, 0, data=1),
    }
    assert look() == {"c:1,a:1", "d:1,e:1"}


def test_workers_by_themselves_join_before_they_answer() -> None:
    listed, fleet, workers = Scripted("dns", ("a:1", "b:1")), FakeFleet(), Workers()
    members = Membership(fleet, port_of, ("z:1",), [listed], ask=workers.ask)
    asyncio.run(members.look(listed))
    assert set(fleet.present) == {"a:1", "b:1", "z:1"}
    fleet.attach_all()
    workers.asked.clear()
    asyncio.run(members.look(listed))
    assert workers.asked == []
