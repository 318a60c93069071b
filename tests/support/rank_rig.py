"""The simulated ranks of a replica, each behind a real loopback server of its own."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType

from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.rank_group import RankGroupWorker
from worker_service.domain.capability import Limits, RankCoordinates
from worker_service.facade import WorkerFacade
from worker_service.rpc.server import WorkerServer
from worker_service.runner.interface import Runner
from worker_service.simulated.runner import SimulatedLatency, SimulatedModel, SimulatedRunner

LIMITS = Limits(
    max_sequence_count=4,
    max_step_token_count=32,
    max_sequence_token_count=128,
    max_prompt_token_count=128,
)
INSTANT = SimulatedLatency(0.0, 0.0, 0.0, 0.0)
MODEL = SimulatedModel("simulated", 500, LIMITS, 200, block_size=8)


def place(index: int, tensor: int, pipeline: int, data: int = 0) -> RankCoordinates:
    """That of the rank with this index."""
    stage, tensor_rank = divmod(index, tensor)
    return RankCoordinates((tensor_rank, tensor), (stage, pipeline), (data, 2))


class RankServer:
    """One rank: a worker that can be killed, and started again at the same port."""

    def __init__(
        self,
        ranks: RankCoordinates,
        *,
        model: SimulatedModel = MODEL,
        latency: SimulatedLatency = INSTANT,
        kind: type[SimulatedRunner] = SimulatedRunner,
        host: str = "127.0.0.1",
        port: int = 0,
    ) -> None:
        self.ranks = ranks
        self.model = model
        self.latency = latency
        self.kind = kind
        self.host = host
        self.port = port
        self._lives = itertools.count(1)
        self._facade: WorkerFacade | None = None
        self._server: WorkerServer | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def facade(self) -> WorkerFacade:
        assert self._facade is not None
        return self._facade

    def _build(self) -> Runner:
        model = replace(
            self.model,
            ranks=self.ranks,
            rendezvous_address="" if self.ranks.rank else ":29500",
        )
        return self.kind(model, self.latency)

    async def start(self) -> None:
        name = f"w{self.ranks.rank}"
        if self.ranks.data[0]:
            name = f"replica-{self.ranks.data[0]}-{name}"
        self._facade = WorkerFacade(
            self._build, worker_id=name, incarnation_id=f"{name}-{self.host}-{next(self._lives)}"
        )
        await self._facade.load()
        self._server = WorkerServer(self._facade)
        address = await self._server.start(self.host, self.port)
        self.port = int(address.rpartition(":")[2])

    async def kill(self) -> None:
        """The connection breaks in the middle of whatever runs."""
        if self._server is None:
            return
        server, self._server = self._server, None
        self.facade.drain()
        server.end_streams()
        await server.stop(0.0)
        await self.facade.close()


class Ranks:
    """All ranks of one replica; the control plane gets them in reverse order."""

    def __init__(self, servers: Sequence[RankServer]) -> None:
        self.servers = servers
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Ranks:
        for server in self.servers:
            self._stack.push_async_callback(server.kill)
            await server.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.wait_for(self._stack.aclose(), 60)

    def worker(self, controller_id: str = "test", attach_timeout: float = 5.0) -> RankGroupWorker:
        """A controller's port over all of them."""
        keys = itertools.count(1)
        return RankGroupWorker(
            [
                GrpcWorker(
                    server.address, controller_id=controller_id, attach_timeout=attach_timeout
                )
                for server in reversed(self.servers)
            ],
            new_key=lambda: f"{controller_id}-{next(keys)}",
        )


def ranks(tensor: int, pipeline: int, **settings: object) -> Ranks:
    """The ranks of a replica, all alike."""
    return Ranks(
        [
            RankServer(place(index, tensor, pipeline), **settings)  # type: ignore[arg-type]
            for index in range(tensor * pipeline)
        ]
    )
