"""Ranks behind one name, as a headless service over a StatefulSet gives them, over real gRPC."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from control_plane.shell.fleet import Fleet
from control_plane.shell.worker_lists import ListedInDns, ListedInFile
from tests.simulation.test_membership_loopback import (
    attached,
    balances,
    finished,
    following,
    generate,
    until,
    worker,
)
from tests.support.rank_rig import MODEL, RankServer, place
from worker_service.domain.capability import RankCoordinates
from worker_service.simulated.runner import SimulatedLatency

SLOW = SimulatedLatency(0.003, 0.0, 0.0, 0.0)


class Service:
    """Pods with addresses of their own at one port, and a name that resolves to those of them
    that it lists."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._count = 1
        self.port = 0
        self.hosts: list[str] = []

    async def pod(self, ranks: RankCoordinates) -> RankServer:
        self._count += 1
        host = f"127.0.0.{self._count}"
        server = RankServer(ranks, model=MODEL, latency=SLOW, host=host, port=self.port)
        await server.start()
        self._stack.push_async_callback(server.kill)
        self.port = server.port
        self.hosts.append(host)
        return server

    async def gone(self, server: RankServer) -> None:
        """It ends, and is resolved no more."""
        await server.kill()
        self.hosts.remove(server.host)

    def resolve(self, host: str, port: int) -> list[str]:
        return list(self.hosts)

    @property
    def list(self) -> ListedInDns:
        return ListedInDns(f"ranks:{self.port}", self.resolve)


@asynccontextmanager
async def service() -> AsyncIterator[Service]:
    async with AsyncExitStack() as stack:
        yield Service(stack)


def joined(*servers: RankServer) -> str:
    return ",".join(server.address for server in servers)


def states(fleet: Fleet) -> set[str]:
    return {replica.life.address for replica in fleet.replicas if not replica.is_leaving}


@pytest.mark.slow
async def test_ranks_of_two_replicas_come_in_any_order_and_one_moves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Half of them are there first, and wait. One is replaced under load by a pod elsewhere: its
    replica's streams go on with the same tokens, and so do the neighbour's."""
    async with service() as pods:
        a0 = await pods.pod(place(0, 1, 2, 0))
        b1 = await pods.pod(place(1, 1, 2, 1))
        async with following(pods.list) as fleet:
            await until(lambda: "ranks wait for others of their replica" in caplog.text)
            assert attached(fleet) == set()
            b0 = await pods.pod(place(0, 1, 2, 1))
            await until(lambda: attached(fleet) == {joined(b0, b1)})
            a1 = await pods.pod(place(1, 1, 2, 0))
            await until(lambda: attached(fleet) == {joined(a0, a1), joined(b0, b1)})
            right = await finished(*await generate(fleet))
            epoch = b0.facade.worker_info().epoch
            group, answers = await generate(fleet)
            await until(lambda: all(len(answer.tokens) >= 3 for answer in answers.values()))
            await pods.gone(a1)
            successor = await pods.pod(place(1, 1, 2, 0))
            await until(lambda: attached(fleet) == {joined(a0, successor), joined(b0, b1)})
            assert await finished(group, answers) == right
            await until(lambda: states(fleet) == attached(fleet))
            balances(fleet)
            assert b0.facade.worker_info().epoch == epoch, "the neighbour was left alone"


@pytest.mark.slow
async def test_a_rank_is_replaced_where_there_is_no_other_replica() -> None:
    """Its replica's streams wait for the new one, and go on with the same tokens."""
    async with service() as pods:
        first = await pods.pod(place(0, 2, 1))
        second = await pods.pod(place(1, 2, 1))
        async with following(pods.list) as fleet:
            await until(lambda: attached(fleet) == {joined(first, second)})
            right = await finished(*await generate(fleet))
            group, answers = await generate(fleet)
            await until(lambda: all(answer.tokens for answer in list(answers.values())[:4]))
            await pods.gone(first)
            await until(lambda: attached(fleet) == set())
            successor = await pods.pod(place(0, 2, 1))
            assert await finished(group, answers) == right
            assert attached(fleet) == {joined(successor, second)}
            await until(lambda: len(fleet.replicas) == 1)
            balances(fleet)


@pytest.mark.slow
async def test_a_rank_that_comes_back_at_its_address_finds_its_replica() -> None:
    """While it is away it is still listed: nobody joins or leaves."""
    async with service() as pods:
        ranks = [await pods.pod(place(index, 2, 2)) for index in range(4)]
        async with following(pods.list) as fleet:
            await until(lambda: attached(fleet) == {joined(*ranks)})
            right = await finished(*await generate(fleet))
            [replica] = fleet.replicas
            group, answers = await generate(fleet)
            await until(lambda: all(answer.tokens for answer in list(answers.values())[:4]))
            await ranks[2].kill()
            await until(lambda: not replica.attached)
            await ranks[2].start()
            assert await finished(group, answers) == right
            assert fleet.replicas == [replica]
            balances(fleet)


async def test_workers_by_themselves_are_not_held_up_by_who_does_not_answer() -> None:
    """One is there, one is not: the first serves, the second is looked for."""
    async with AsyncExitStack() as stack:
        address, facade = await stack.enter_async_context(worker("w"))
        port = address.rpartition(":")[2]
        listed = ListedInDns(f"workers:{port}", lambda host, port: ["127.0.0.1", "127.0.0.77"])
        async with following(listed) as fleet:
            await until(lambda: attached(fleet) == {f"127.0.0.1:{port}"})
            assert states(fleet) == {f"127.0.0.1:{port}", f"127.0.0.77:{port}"}
            await finished(*await generate(fleet))
            assert facade.worker_info().epoch == 1
            balances(fleet)


async def test_a_file_may_name_ranks_one_by_one_or_together(tmp_path: Path) -> None:
    path = tmp_path / "workers"
    async with service() as pods:
        ranks = [await pods.pod(place(index, 2, 1)) for index in range(2)]
        path.write_text(f"{ranks[1].address}\n{ranks[0].address}\n")
        async with following(ListedInFile(path)) as fleet:
            await until(lambda: attached(fleet) == {joined(*ranks)})
            [replica] = fleet.replicas
            path.write_text(f"{joined(*ranks)} # the same\n")
            await finished(*await generate(fleet))
            assert fleet.replicas == [replica] and ranks[0].facade.worker_info().epoch == 1
            balances(fleet)
