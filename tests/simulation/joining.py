"""A fleet whose members follow a list, in virtual time, and the machines behind the addresses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from control_plane.core import invariants
from control_plane.shell.membership import Membership
from control_plane.shell.ports import Worker
from control_plane.shell.replica import Replica, ReplicaSettings
from control_plane.shell.worker_lists import ListUnusable
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import Answer, Rig, request, settings, until
from tests.simulation.virtual_time import VirtualLoop, run_virtual

STEP_SECONDS = 0.01
PROMPT = [5, 6, 7, 8, 9]


class Network:
    """Which machine is behind each address. A port is made anew whenever an address joins."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.ports: dict[str, list[FakeWorker]] = {}
        self.listed: tuple[str, ...] | Exception = ListUnusable("not yet")
        self.name = "list"

    def add(self, address: str, name: str, **changes: Any) -> Machine:
        """A machine with a worker that calls itself `name`."""
        machine = self.machines[address] = Machine(name=name, **changes)
        return machine

    def worker_at(self, address: str) -> Worker:
        port = _Port(self, address)
        self.ports.setdefault(address, []).append(port)
        return port

    async def read(self) -> tuple[str, ...]:
        if isinstance(self.listed, Exception):
            raise self.listed
        return self.listed

    def kill(self, address: str) -> None:
        """The worker there dies."""
        self.machines.pop(address)
        for port in self.ports.get(address, []):
            port.break_connection()


class _Port(FakeWorker):
    """To whoever is at an address when it is attached to."""

    def __init__(self, network: Network, address: str) -> None:
        super().__init__(Machine(), lambda: STEP_SECONDS)
        self._network = network
        self._address = address

    async def attach(self, epoch: int | None = None, admit: Any = None) -> Any:
        found = self._network.machines.get(self._address)
        self.reachable = found is not None
        if found is not None:
            self.machine = found
        return await super().attach(epoch, admit)


class World:
    def __init__(self, rig: Rig, network: Network, members: Membership) -> None:
        self.rig = rig
        self.network = network
        self.members = members
        self.answers: list[tuple[int, int, Answer]] = []

    def submit(self, count: int, max_tokens: int = 40) -> None:
        for _ in range(count):
            seed = len(self.answers) + 1
            asked = request(f"r{seed}", PROMPT, max_tokens, seed=seed, arrival=self.rig.loop.time())
            self.answers.append((seed, max_tokens, self.rig.submit(asked)))

    async def lists(self, *addresses: str) -> None:
        self.network.listed = addresses
        await self.members.look(self.network)

    async def attached(self, *addresses: str) -> None:
        await until(lambda: {r.life.address for r in self.replicas() if r.attached} >= {*addresses})

    def replicas(self) -> list[Replica]:
        return self.rig.fleet.replicas

    def at(self, address: str) -> Replica:
        """The replica of an address that does not leave."""
        (found,) = [
            replica
            for replica in self.replicas()
            if replica.life.address == address and replica.state.value != "draining"
        ]
        return found

    async def under_way(self, count: int = 3) -> None:
        await until(lambda: all(len(answer.tokens) >= count for _, _, answer in self.answers))

    async def settled(self) -> None:
        """Every answer is whole and right."""
        await self.rig.settled(*(answer for _, _, answer in self.answers))
        for seed, count, answer in self.answers:
            assert answer.error is None, answer.error
            assert answer.tokens == expected_tokens(PROMPT, count, seed)

    def balances(self) -> None:
        """No row, block, place or gauge is held by anybody."""
        for replica in self.replicas():
            member = replica.member()
            if member is not None:
                invariants.check(member.core)
                stats = member.core.stats()
                assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)
        assert not self.rig.fleet.register.requests
        numbers = {str(replica.number) for replica in self.replicas()}
        assert self.rig.telemetry.replicas.keys() == numbers, "series of one that has left"
        moves = [replica.moves for replica in self.rig.telemetry.replicas.values()]
        for directions in moves:
            assert all(count >= 0 for count in directions.values())


@asynccontextmanager
async def world(
    loop: VirtualLoop, network: Network, chosen: ReplicaSettings | None = None
) -> AsyncIterator[World]:
    rig = Rig(loop, [], chosen or settings(), 0)
    members = Membership(rig.fleet, network.worker_at, (), [network])
    async with rig.group:
        running = rig.group.create_task(rig.fleet.run())
        made = World(rig, network, members)
        yield made
        async with asyncio.timeout(1000):
            await made.settled()
        await until(lambda: all(r.state.value != "draining" for r in made.replicas()))
        made.balances()
        running.cancel()


def metric(rig: Rig, name: str, **labels: str) -> float:
    """The sum of the series of a name that have these labels."""
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    total = 0.0
    for line in rig.telemetry.render().decode().splitlines():
        series, _, value = line.rpartition(" ")
        if series.partition("{")[0] == f"twinplane_{name}" and all(w in series for w in wanted):
            total += float(value)
    return total


def told(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.getMessage() == message]
    return [record.__dict__["fields"] for record in records]


def run(main: Callable[[World], Any], *workers: str, chosen: ReplicaSettings | None = None) -> None:
    """Runs `main` in a world with a worker at each address, all listed and attached."""

    async def whole(loop: VirtualLoop) -> None:
        network = Network()
        for address in workers:
            network.add(address, f"worker at {address}")
        async with world(loop, network, chosen) as made:
            async with asyncio.timeout(1000):
                await made.lists(*workers)
                await made.attached(*workers)
                await main(made)

    run_virtual(whole)
