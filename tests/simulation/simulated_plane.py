"""A control plane of a simulated run, and what its clients see."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from control_plane.core.events import Finish
from control_plane.shell.replica import Replica
from control_plane.shell.stream import TokenStream
from tests.simulation.hosts import Host
from tests.simulation.rig import Rig, StopAt
from tests.simulation.scenario import Ask
from tests.simulation.virtual_time import VirtualLoop

if TYPE_CHECKING:
    from tests.simulation.world import World


@dataclass(slots=True, eq=False)
class Seen:
    """What a client saw, over all control planes it asked. `excused`: nobody could have served."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None
    end_count: int = 0
    resume_count: int = 0
    cancelled: bool = False
    excused: bool = False


class Plane:
    """One life of a control plane."""

    def __init__(self, loop: VirtualLoop, world: World, hosts: list[Host], seed: int) -> None:
        self.world = world
        chosen = world.settings()
        self.connections = [world.connect(host) for host in hosts]
        self.rig = Rig(
            loop, self.connections, chosen, seed, clock=lambda: loop.time() + world.ahead
        )
        self.replicas: list[Replica] = list(self.rig.fleet.replicas)
        """Those that have left, too."""
        self.of_host = dict(zip(hosts, self.replicas, strict=True))
        self.is_dead = False
        self.away_since: dict[Replica, float] = {}
        """Of replicas without their worker: when that was seen first."""
        self.checked: dict[Replica, tuple[object, ...]] = {}
        """Of replicas whose books were found right: how they stood then."""
        self.task = asyncio.create_task(self.rig.fleet.run())

    async def die(self) -> None:
        self.is_dead = True
        for connection in self.connections:
            connection.break_connection(self.world.rng.randrange(3))
            connection.host.connections.remove(connection)
        self.task.cancel()
        await asyncio.wait([self.task])

    def join(self, host: Host) -> None:
        connection = self.world.connect(host)
        self.connections.append(connection)
        self.of_host[host] = replica = self.rig.fleet.join(connection)
        self.replicas.append(replica)

    def leave(self, host: Host) -> None:
        self.rig.fleet.leave(self.of_host[host])

    def claims(self, host: Host) -> bool:
        """Whether a worker is this plane's: of a rival it hears only with its next step."""
        core = self.of_host[host]._core
        return core is not None and core.ledger.epoch == host.machine.epoch

    def could_serve(self, ask: Ask) -> bool:
        """Whether a worker is there that surely can go on with a request, to the same length."""
        played = self.world.scenario
        if not played.may_cross and len({host.machine.arithmetic for host in self.of_host}) > 1:
            return False
        longest = max(host.machine.max_sequence_token_count for host in self.of_host)
        wanted = min(len(ask.prompt) + ask.max_tokens, longest)
        return any(
            replica.attached and host.machine.max_sequence_token_count >= wanted
            for host, replica in self.of_host.items()
            if host not in self.world.leaving
        )


class WatchedStream(TokenStream):
    """Notes, when it fails, whether anybody could have served it then."""

    def __init__(self, plane: Plane, ask: Ask, seen: Seen, sink: StopAt | None) -> None:
        super().__init__(sink)
        self._plane = plane
        self._ask = ask
        self._seen = seen

    def fail(self, error: Exception) -> None:
        self._seen.excused = self._plane.is_dead or not self._plane.could_serve(self._ask)
        super().fail(error)
