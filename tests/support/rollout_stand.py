"""Two simulated workers and a control plane with an operators' port, as processes that are started
again whenever they have ended, and clients that ask on and on."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests.support.planes import Plane, free_port, is_serving
from tests.support.tiny_model import write_tiny_model
from twinplane import AsyncClient, GenerationResult
from twinplane.control.v1 import control_pb2 as pb
from twinplane.control.v1 import control_pb2_grpc

END_SECONDS = 120.0
NAMES = ("a", "b")


@dataclass(slots=True, eq=False)
class Stand:
    """`ports`: of the two workers, of the clients, and of operators."""

    folder: Path
    model: Path
    ports: tuple[int, int, int, int]
    planes: list[Plane] = field(default_factory=list)
    start_count: int = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.ports[2]}"

    @property
    def admin(self) -> str:
        return f"127.0.0.1:{self.ports[3]}"

    def start(self, number: int) -> Plane:
        """Worker 0 or 1, or, by 2, the control plane."""
        self.start_count += 1
        log = self.folder / f"plane-{number}-{self.start_count}.log"
        if number < 2:
            flags = [
                *("worker", "--simulate", "--simulate-step-ms=2"),
                *(f"--weights-root={self.folder / 'weights'}", f"--worker-id=worker-{number}"),
            ]
        else:
            flags = [
                *("control", "--metrics-port=none", f"--admin-port={self.ports[3]}"),
                *(f"--state-dir={self.folder / 'state'}",),
                *(f"--worker=127.0.0.1:{port}" for port in self.ports[:2]),
            ]
        return Plane([*flags, f"--model={self.model}", f"--port={self.ports[number]}"], log)

    async def keep(self) -> None:
        """Starts again what has ended."""
        while True:
            await asyncio.sleep(0.02)
            for number, plane in enumerate(self.planes):
                if plane.process.poll() is not None:
                    self.planes[number] = self.start(number)

    def kill(self, number: int) -> None:
        self.planes[number].process.send_signal(signal.SIGKILL)


@asynccontextmanager
async def standing(folder: Path) -> AsyncIterator[Stand]:
    """All of it, serving."""
    stand = Stand(
        folder,
        write_tiny_model(folder / "model"),
        (free_port(), free_port(), free_port(), free_port()),
    )
    for name in NAMES:
        (folder / "weights" / name).mkdir(parents=True)
        (folder / "weights" / name / "config.json").write_text(name)
    stand.planes = [stand.start(number) for number in range(3)]
    keeping = asyncio.create_task(stand.keep())
    try:
        async with asyncio.timeout(END_SECONDS):
            while not await asyncio.to_thread(is_serving, stand.address):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        yield stand
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        for plane in stand.planes:
            plane.stop(signal.SIGKILL)


@asynccontextmanager
async def operating(stand: Stand) -> AsyncIterator[Any]:
    """A stub of ControlService."""
    options = [("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 200)]
    async with grpc.aio.insecure_channel(stand.admin, options=options) as channel:
        yield control_pb2_grpc.ControlServiceStub(channel)


def order(name: str, **fields: Any) -> list[pb.UpdateWeightsRequest]:
    """The messages that ask for the weights of one of NAMES."""
    rollout = pb.WeightsRollout(name=name, **fields)
    rollout.disk.path = name
    return [pb.UpdateWeightsRequest(rollout=rollout)]


async def states(stub: Any) -> AsyncIterator[pb.WeightsState]:
    """Each state until the rollout is over, over restarts of the control plane."""
    while True:
        try:
            async for message in stub.WatchWeights(pb.WatchWeightsRequest(), wait_for_ready=True):
                yield message.state
            return
        except grpc.aio.AioRpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error


async def all_current(stub: Any, name: str) -> pb.WeightsState:
    """Waits until both replicas have what is wanted, which is called so."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = pb.GetWeightsRequest()
            state: pb.WeightsState = (await stub.GetWeights(request, wait_for_ready=True)).state
            phases = [replica.phase for replica in state.replicas]
            if phases == [pb.REPLICA_PHASE_CURRENT] * 2:
                assert {replica.name for replica in state.replicas} == {name}
                return state
        await asyncio.sleep(0.02)


@asynccontextmanager
async def clients(stand: Stand, count: int, tokens: int) -> AsyncIterator[list[GenerationResult]]:
    """So many ask one thing after another; the list has their answers as they come. Raises what
    any of them raises."""
    answers: list[GenerationResult] = []
    ends = asyncio.Event()

    async def ask(client: AsyncClient, number: int) -> None:
        turn = 0
        while not ends.is_set():
            turn += 1
            text = f"client {number} asks for the {turn}th time"
            answers.append(await client.complete(text, max_tokens=tokens, ignore_eos=True))

    async with AsyncClient(stand.address) as client, asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(ask(client, number))
        try:
            yield answers
        finally:
            ends.set()


def names_of(answer: GenerationResult) -> Sequence[str]:
    """The weights that made it, in order."""
    return [span.weights_name for span in answer.weights_spans]
