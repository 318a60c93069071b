"""Which workers of a list are the ranks of one replica: by what they tell, where no line says it.

A name resolves to addresses and nothing else, e.g. that of a headless service over a StatefulSet
whose pods are ranks. A rank tells its place and how many there are, so one that is there says who
is missing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from control_plane.shell.ports import RankCoordinates

_MAX_QUESTIONS = 32
"""At once."""
_MAX_TOLD = 8
"""Missing ranks that are named."""

Ask = Callable[[str], Awaitable[RankCoordinates | None]]
"""A worker's place among others; None: it does not answer now."""
_Members = dict[RankCoordinates, str]
"""Ranks that belong together, by their places."""


@dataclass(frozen=True, slots=True)
class Grouped:
    """The replicas of a list, as `--worker` takes them. `waiting` belong to none yet; `missing`
    says whom they wait for."""

    replicas: tuple[str, ...]
    waiting: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def grouped(
    listed: Sequence[str],
    places: Mapping[str, RankCoordinates],
    *,
    serving: Collection[str] = (),
    joined: Collection[str] = (),
    answered: Collection[str] = (),
) -> Grouped:
    """Joins the ranks of each replica, in their order.

    `places` are those that workers have told. What is `serving` stays as it is while all of it is
    listed. So does a replica that has `joined`, but that one who has `answered` just now takes the
    place of one who has not. Where several have one place of one data-parallel rank, they are of
    several replicas. Who has never told anything is a worker of its own, unless others have turned
    out to be ranks.
    """
    kept = [one for one in serving if _is_listed(one, listed)]
    teams: dict[RankCoordinates, list[_Members]] = {}
    taken = {address for one in kept for address in one.split(",")}
    for replica in joined:
        members = {places[one]: one for one in replica.split(",") if one in places}
        if taken.isdisjoint(members.values()) and _is_whole(members) and replica not in listed:
            teams.setdefault(_team(next(iter(members))), []).append(members)
            taken.update(members.values())
    rest = sorted(set(listed) - taken - set(kept), key=lambda one: (one not in answered, one))
    alone, unknown, waiting = list[str](), list[str](), list[str]()
    missing = dict[str, None]()
    for address in rest:
        place = places.get(address)
        if "," in address or (place is not None and _size(place) == 1):
            alone.append(address)
        elif place is None:
            unknown.append(address)
        else:
            _seat(teams.setdefault(_team(place), []), place, address, answered)
    for team, groups in teams.items():
        for members in groups:
            if _is_whole(members):
                kept.append(",".join(members[place] for place in sorted(members, key=_order)))
            else:
                waiting += members.values()
                absent = (place for place in _places(team) if place not in members)
                missing |= {_named(place): None for place in islice(absent, _MAX_TOLD)}
    if teams or any(one not in listed for one in kept):
        waiting += unknown
    else:
        alone += unknown
    return Grouped((*kept, *alone), tuple(waiting), tuple(missing))


class Grouping:
    """What the workers of one list have told."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._places: dict[str, RankCoordinates] = {}

    async def of(
        self, listed: Sequence[str], serving: Collection[str], joined: Collection[str]
    ) -> Grouped:
        """The replicas of a list. Who serves is not asked again."""
        taken = {address for one in serving for address in one.split(",")}
        asked = [one for one in listed if "," not in one and one not in taken]
        room = asyncio.Semaphore(_MAX_QUESTIONS)

        async def place_of(address: str) -> RankCoordinates | None:
            async with room:
                return await self._ask(address)

        told = await asyncio.gather(*map(place_of, asked))
        answered = {
            address: place for address, place in zip(asked, told, strict=True) if place is not None
        }
        self._places = {
            address: place
            for address, place in (self._places | answered).items()
            if address in listed
        }
        return grouped(listed, self._places, serving=serving, joined=joined, answered=answered)


def _seat(
    groups: list[_Members], place: RankCoordinates, address: str, answered: Collection[str]
) -> None:
    """Into the first group where the place is free, or has who is not there while this one is."""
    for members in groups:
        if place not in members:
            members[place] = address
            return
    for members in groups:
        if address in answered and members[place] not in answered:
            members[place], address = address, members[place]
    groups.append({place: address})


def _is_whole(members: _Members) -> bool:
    """Whether they are all ranks of one replica."""
    teams = {_team(place) for place in members}
    return len(teams) == 1 and len(members) == _size(teams.pop()) > 1


def _is_listed(replica: str, listed: Sequence[str]) -> bool:
    return replica in listed or set(replica.split(",")).issubset(listed)


def _team(place: RankCoordinates) -> RankCoordinates:
    """What all ranks of a replica have in common."""
    return replace(place, tensor=(0, place.tensor[1]), pipeline=(0, place.pipeline[1]))


def _size(place: RankCoordinates) -> int:
    return place.tensor[1] * place.pipeline[1]


def _order(place: RankCoordinates) -> tuple[int, int]:
    return place.pipeline[0], place.tensor[0]


def _places(team: RankCoordinates) -> Iterator[RankCoordinates]:
    """All, however many a worker says there are."""
    (_, tensor_size), (_, stage_count) = team.tensor, team.pipeline
    for stage in range(stage_count):
        for rank in range(tensor_size):
            yield replace(team, tensor=(rank, tensor_size), pipeline=(stage, stage_count))


def _named(place: RankCoordinates) -> str:
    return str(place) if place.data[1] == 1 else f"{place} of data-parallel rank {place.data[0]}"
