"""Which replicas there should be, and making it so: level-based, list against list.

Every source of addresses is looked at again and again. What all of them name together should be
there: what is new joins, what is gone leaves. Nothing else is remembered, so that a look that was
missed or failed costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from control_plane.shell.grouping import Ask, Grouped, Grouping
from control_plane.shell.ports import Worker
from control_plane.shell.replica import Replica
from control_plane.shell.worker_lists import MAX_REPLICAS, ListUnusable, WorkerList
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Difference:
    """What joins and what leaves, so that what should be there is there.

    `refused` can't join: one of its ranks belongs to a replica that stays, or there would be more
    than MAX_REPLICAS.
    """

    joining: tuple[str, ...]
    leaving: tuple[str, ...]
    refused: tuple[str, ...] = ()


def difference(desired: Iterable[str], present: Collection[str]) -> Difference:
    """Compares the replicas that should be there, the first wanted first, with those that are."""
    wanted = dict.fromkeys(desired)
    staying = [replica for replica in present if replica in wanted]
    taken = {rank for replica in staying for rank in replica.split(",")}
    count, joining, refused = len(staying), [], []
    for replica in wanted:
        if replica in present:
            continue
        ranks = replica.split(",")
        if count == MAX_REPLICAS or not taken.isdisjoint(ranks):
            refused.append(replica)
            continue
        count += 1
        taken.update(ranks)
        joining.append(replica)
    leaving = tuple(replica for replica in present if replica not in wanted)
    return Difference(tuple(joining), leaving, tuple(refused))


class Members(Protocol):
    """The fleet, as far as replicas join and leave it."""

    def join(self, worker: Worker, address: str = "") -> Replica:
        """Adds a replica for a worker."""
        ...

    def leave(self, replica: Replica) -> None:
        """A replica takes nothing more, and goes."""
        ...


class Membership:
    """Keeps a fleet's replicas equal to what settings and lists name. Owned by one task, `run`.

    `named` are there for ever. `worker_at` makes the port of an address. `refresh_seconds` pass
    between two looks at a list. Workers that are listed one by one are asked by `ask` whether they
    are ranks, and those of a replica join together; without it, each is what its line says.
    """

    def __init__(
        self,
        members: Members,
        worker_at: Callable[[str], Worker],
        named: Sequence[str],
        lists: Sequence[WorkerList] = (),
        *,
        refresh_seconds: float = 5.0,
        ask: Ask | None = None,
    ) -> None:
        self._members = members
        self._worker_at = worker_at
        self._named = tuple(named)
        self._lists = lists
        self._refresh_seconds = refresh_seconds
        self._listed: dict[str, tuple[str, ...]] = {}
        """By the name of a list, what it named at the last look that succeeded."""
        self._groupings = {} if ask is None else {one.name: Grouping(ask) for one in lists}
        self._waiting: dict[str, Grouped] = {}
        """By the name of a list, the ranks that wait for others, as they were told last."""
        self._troubles: dict[str, str] = {}
        """By the name of a list, why the last look at it failed."""
        self._present: dict[str, Replica] = {}
        self._refused: tuple[str, ...] = ()
        self._reconcile()

    @property
    def present(self) -> Collection[str]:
        """The addresses that have joined and do not leave."""
        return self._present.keys()

    async def run(self) -> None:
        """Looks at the lists, until cancelled. Returns at once where there are none."""
        async with asyncio.TaskGroup() as group:
            for one in self._lists:
                group.create_task(self._follow(one))

    async def _follow(self, one: WorkerList) -> None:
        while True:
            await self.look(one)
            await asyncio.sleep(self._refresh_seconds)

    async def look(self, one: WorkerList) -> None:
        """Looks at a list once, and makes the fleet as it says. What is wrong with it is told."""
        try:
            found = await self._grouped(one.name, await one.read())
        except ListUnusable as error:
            self._tell_trouble(one.name, str(error))
            return
        except Exception as error:  # a bug of ours must not cost what runs
            _logger.error("looking at a list of workers failed", exc_info=error)
            self._tell_trouble(one.name, f"{type(error).__name__}: {error}")
            return
        if self._troubles.pop(one.name, None) is not None:
            _logger.info("the list of workers can be used again", extra=fields(source=one.name))
        if found != self._listed.get(one.name):
            self._listed[one.name] = found
            self._reconcile()

    async def _grouped(self, name: str, listed: tuple[str, ...]) -> tuple[str, ...]:
        """The replicas that a list means. Who waits for others of its replica is told once."""
        grouping = self._groupings.get(name)
        if grouping is None:
            return listed
        serving = [one for one, replica in self._present.items() if replica.attached]
        found = await grouping.of(listed, serving, list(self._present))
        told = replace(found, replicas=())
        if told.waiting and told != self._waiting.get(name):
            _logger.warning(
                "ranks wait for others of their replica",
                extra=fields(
                    source=name, waiting=" ".join(told.waiting), missing=", ".join(told.missing)
                ),
            )
        self._waiting[name] = told
        return found.replicas

    def _tell_trouble(self, name: str, trouble: str) -> None:
        """Logs each trouble once, until it changes."""
        if self._troubles.get(name) != trouble:
            self._troubles[name] = trouble
            kept = len(self._listed.get(name, ()))
            _logger.warning(
                "the list of workers can't be used: its last workers stay",
                extra=fields(source=name, reason=trouble, kept_replica_count=kept),
            )

    def _reconcile(self) -> None:
        """Joins what is new, and leaves what is gone. What leaves does so first: a rank may go from
        one replica to another."""
        desired = [*self._named, *(one for found in self._listed.values() for one in found)]
        change = difference(desired, self._present)
        for address in change.leaving:
            self._members.leave(self._present.pop(address))
        for address in change.joining:
            self._present[address] = self._members.join(self._worker_at(address), address)
        if change.joining or change.leaving:
            _logger.info(
                "the fleet changes",
                extra=fields(
                    joining=" ".join(change.joining),
                    leaving=" ".join(change.leaving),
                    replica_count=len(self._present),
                ),
            )
        if change.refused and change.refused != self._refused:
            _logger.warning(
                "workers are listed that can't join",
                extra=fields(
                    refused=" ".join(change.refused),
                    reason="one of their ranks belongs to another replica, or there are "
                    f"{MAX_REPLICAS} replicas",
                ),
            )
        self._refused = change.refused
