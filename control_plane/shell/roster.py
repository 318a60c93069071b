"""Which replicas there are, and the tasks that run them: they may come and go while others run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from control_plane.core.fleet import Member
from control_plane.shell.ports import MoveMetrics, WorkerElsewhere, WorkerInfo, WorkerUnusable
from control_plane.shell.replica import Replica
from control_plane.shell.served_weights import ServedWeights


class Roster:
    """The fleet's replicas, each by a number that no other ever has. Runs their tasks.

    `on_gone` is called when a replica has left.
    """

    def __init__(
        self, on_gone: Callable[[], None], metrics: MoveMetrics, served_weights: ServedWeights
    ) -> None:
        self._served_weights = served_weights
        self._by_number: dict[int, Replica] = {}
        self._on_gone = on_gone
        self._metrics = metrics
        self._numbers = count()
        self._joined = asyncio.Event()

    def add(self, make: Callable[[int], Replica]) -> Replica:
        """Adds the replica that `make` makes for a new number. It runs while `run` does."""
        replica = make(next(self._numbers))
        self._by_number[replica.number] = replica
        self._joined.set()
        return replica

    @property
    def replicas(self) -> list[Replica]:
        """All of them, in the order in which they were added."""
        return list(self._by_number.values())

    def __len__(self) -> int:
        return len(self._by_number)

    def members(self) -> list[Member]:
        """Of all replicas that had a worker once."""
        return [member for replica in self.replicas if (member := replica.member()) is not None]

    def numbered(self, number: int) -> Replica:
        """The replica of a number."""
        return self._by_number[number]

    def member(self, number: int) -> Member | None:
        """A replica as the core sees it; None when it has left or never had a worker."""
        replica = self._by_number.get(number)
        return None if replica is None else replica.member()

    def objection(self, replica: Replica, info: WorkerInfo) -> WorkerUnusable | None:
        """Why a worker can't serve beside those that are attached; None: it can.

        Once it is decided which weights answer, one with others may come, and gets them.
        A replica that leaves is in nobody's way. A worker that is attached under the same id is
        replaced, by a life of it that this replica has not had before: else two workers of one id
        would replace each other for ever.
        """
        if info.weights_trouble and not self._served_weights.is_decided:
            return WorkerUnusable(info.weights_trouble)
        for other in self.replicas:
            if other is replica or other.is_leaving:
                continue
            attachment = other.serving.attachment if other.attached else None
            known = attachment.info if attachment else None
            here = known.incarnation_id if known else other.life.claiming
            if here == info.incarnation_id:
                return WorkerElsewhere(
                    f"worker {info.worker_id!r} is here already, as replica {other.number}"
                )
            if known is None:
                continue
            if known.worker_id == info.worker_id != "":
                last = replica.serving.attachment
                if last is not None and last.info.incarnation_id == info.incarnation_id:
                    return WorkerUnusable(
                        f"another worker has its id {info.worker_id!r}, as replica {other.number}:"
                        " give each a --worker-id of its own"
                    )
                continue
            digests = known.weight_version.digest, info.weight_version.digest
            if digests[0] != digests[1] and not self._served_weights.is_decided:
                return WorkerUnusable(
                    f"its weights are not those of replica {other.number}, which serves"
                )
            if known.vocabulary_size != info.vocabulary_size:
                return WorkerUnusable(
                    f"its vocabulary is not that of replica {other.number}, which serves"
                )
        return None

    def namesakes(self, replica: Replica) -> list[Replica]:
        """The other replicas whose last worker had the id of this one's."""
        worker_id = replica.life.worker_id
        return [
            other
            for other in self.replicas
            if other is not replica and other.life.worker_id == worker_id != ""
        ]

    async def run(self) -> None:
        """Runs each replica from when it is added until it has left. Never returns by itself.

        Raises what is a bug of ours.
        """
        tasks: dict[asyncio.Future[Any], Replica] = {}
        joined: asyncio.Future[Any] = asyncio.create_task(self._joined.wait())
        try:
            while True:
                if joined.done():
                    self._joined.clear()
                    started = set(tasks.values())
                    for replica in self.replicas:
                        if replica not in started:
                            tasks[asyncio.create_task(replica.run())] = replica
                    joined = asyncio.create_task(self._joined.wait())
                ended, _ = await asyncio.wait((*tasks, joined), return_when=asyncio.FIRST_COMPLETED)
                for task in ended:
                    if task is not joined:
                        replica = tasks.pop(task)
                        task.result()
                        del self._by_number[replica.number]
                        self._metrics.replica_left(replica.number)
                        self._on_gone()
        finally:
            for task in (*tasks, joined):
                task.cancel()
            await asyncio.wait((*tasks, joined))
