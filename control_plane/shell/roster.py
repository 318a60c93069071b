"""Which replicas there are, and the tasks that run them: they may come and go while others run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from itertools import count
from typing import Any

from control_plane.core.fleet import Member
from control_plane.shell.ports import WorkerInfo
from control_plane.shell.replica import Replica


class Roster:
    """The fleet's replicas, each by a number that no other ever has. Runs their tasks.

    `on_gone` is called when a replica has left.
    """

    def __init__(self, on_gone: Callable[[], None]) -> None:
        self._by_number: dict[int, Replica] = {}
        self._on_gone = on_gone
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

    def objection(self, replica: Replica, info: WorkerInfo) -> str | None:
        """Why a worker can't serve beside those that are attached; None: it can."""
        for other in self.replicas:
            if other is replica or not other.attached or other.attachment is None:
                continue
            known = other.attachment.info
            if known.incarnation_id == info.incarnation_id:
                return f"worker {info.worker_id!r} is here already, as replica {other.number}"
            if known.weight_version.digest != info.weight_version.digest:
                return f"its weights are not those of replica {other.number}, which serves"
            if known.vocabulary_size != info.vocabulary_size:
                return f"its vocabulary is not that of replica {other.number}, which serves"
        return None

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
                        self._on_gone()
        finally:
            for task in (*tasks, joined):
                task.cancel()
            await asyncio.wait((*tasks, joined))
