"""ControlService over a real loopback server: what it refuses, keeps and answers."""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration

from control_plane.core.weights import (
    Placement,
    PreparedWeights,
    SpooledSource,
    WeightsUpdate,
)
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.control_servicer import ControlServicer
from control_plane.rpc.errors import status_of
from control_plane.rpc.weights_client import Spool
from control_plane.shell.engine import EnginePaused
from control_plane.shell.fleet import Fleet
from control_plane.shell.ports import PreparedUpdate
from control_plane.shell.rollout_store import RolloutStore
from control_plane.shell.rollouts import Rollouts
from tests.simulation.fake_machine import Machine
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.rig import settings
from twinplane.control.v1 import control_pb2 as pb
from twinplane.control.v1 import control_pb2_grpc
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.grpc.status import Status, read
from twinplane.worker.v1 import info_pb2, weights_pb2

F32, BF16 = info_pb2.DATA_TYPE_FLOAT32, info_pb2.DATA_TYPE_BFLOAT16


class KeepingWorker(FakeWorker):
    """Takes streamed weights too, and remembers their tensors: each name's bytes."""

    def __init__(self) -> None:
        super().__init__(Machine())
        self.tensors: dict[str, bytes] = {}
        self.sha256: dict[str, bytes] = {}

    async def prepare(self, update: WeightsUpdate) -> PreparedWeights:
        if not isinstance(update.source, SpooledSource):
            return await super().prepare(update)
        spool = Spool(update.source)
        try:
            self.tensors = {tensor.name: b"" for tensor, _, _ in spool.tensors}
            self.sha256 = {tensor.name: tensor.sha256 for tensor, _, _ in spool.tensors}
            names = list(self.tensors)
            async for chunk in spool.chunks():
                self.tensors[names[chunk.tensor_index]] += chunk.data
        finally:
            await spool.close()
        total = hashlib.sha256(repr(self.tensors).encode()).hexdigest()
        self.machine.prepared = PreparedUpdate(update.update_id, total)
        return PreparedWeights(update.update_id, total, Placement.BESIDE, 1, 0)


@dataclass
class Edge:
    """The stub, and what is behind it."""

    stub: Any
    fleet: Fleet
    workers: list[KeepingWorker]
    rollouts: Rollouts
    store: RolloutStore
    folder: Path
    ends: list[str] = field(default_factory=list)

    def spools(self) -> list[Path]:
        return sorted((self.folder / "weights").iterdir())

    async def refused(self, messages: Iterable[pb.UpdateWeightsRequest]) -> Status:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await self.stub.UpdateWeights(iter(messages))
        return read(error.value)

    async def over(self) -> pb.WeightsState:
        async with asyncio.timeout(60):
            states = [m.state async for m in self.stub.WatchWeights(pb.WatchWeightsRequest())]
        return states[-1]


@asynccontextmanager
async def edge(folder: Path, worker_count: int = 2) -> AsyncIterator[Edge]:
    workers = [KeepingWorker() for _ in range(worker_count)]
    for number, worker in enumerate(workers):
        worker.machine.name = f"fake-{number}"
    fleet = Fleet(
        workers,
        settings(),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("0"),
        on_readiness=lambda ready: None,
    )
    store, names = RolloutStore(folder), count(1)
    rollouts = Rollouts(fleet, store, clock=time.monotonic, new_id=lambda: f"rollout-{next(names)}")
    interceptor = StatusInterceptor(status_of, lambda end: None, lambda: "error-1")
    server = grpc.aio.server(interceptors=[interceptor])
    control_pb2_grpc.add_ControlServiceServicer_to_server(
        ControlServicer(rollouts, fleet.weights), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    tasks = [asyncio.create_task(each) for each in (fleet.run(), rollouts.run())]
    try:
        async with asyncio.timeout(60):
            while not all(replica.attached for replica in fleet.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            yield Edge(stub, fleet, workers, rollouts, store, folder)
    finally:
        await server.stop(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        store.close()


def disk(path: str = "v2", **changes: Any) -> pb.UpdateWeightsRequest:
    rollout = pb.WeightsRollout(name=changes.pop("name", "v2"), **changes)
    rollout.disk.path = path
    return pb.UpdateWeightsRequest(rollout=rollout)


def tensor(name: str, shape: list[int], data_type: int = F32, **changes: Any) -> Any:
    return weights_pb2.TensorDescription(name=name, shape=shape, data_type=data_type, **changes)


def stream(*tensors: Any, **changes: Any) -> pb.UpdateWeightsRequest:
    rollout = pb.WeightsRollout(name="streamed", **changes)
    rollout.stream.tensors.extend(tensors)
    return pb.UpdateWeightsRequest(rollout=rollout)


def chunk(index: int, offset: int, data: bytes) -> pb.UpdateWeightsRequest:
    return pb.UpdateWeightsRequest(
        chunk=weights_pb2.TensorChunk(tensor_index=index, offset=offset, data=data)
    )


def canary(percent: int, seconds: int | None = None) -> pb.Canary:
    observation = None if seconds is None else Duration(seconds=seconds)
    return pb.Canary(percent=percent, observation=observation)


UNKNOWN = pb.UpdateWeightsRequest()
UNKNOWN.ParseFromString(disk().SerializeToString() + b"\x98\x06\x01")
TWO = (tensor("a", [2, 2]), tensor("b", [3], BF16))
BAD: list[tuple[str, list[pb.UpdateWeightsRequest]]] = [
    ("message", []),
    ("message", [pb.UpdateWeightsRequest()]),
    ("message", [chunk(0, 0, b"1234")]),
    ("99", [UNKNOWN]),
    ("rollout.source", [pb.UpdateWeightsRequest(rollout=pb.WeightsRollout(name="v"))]),
    *(("rollout.name", [disk(name=name)]) for name in ("", "x" * 65, "ü", "a\nb", "\x7f")),
    *(("rollout.disk.path", [disk(path)]) for path in ("", "a\0b", "x" * 4097, "ü" * 2049)),
    *(("rollout.strategy", [disk(strategy=value)]) for value in (3, 99, -1)),
    *(("rollout.in_flight", [disk(in_flight=value)]) for value in (5, 99, -1)),
    *(("rollout.placement", [disk(placement=value)]) for value in (3, 99, -1)),
    *(
        ("rollout.expected_digest", [disk(expected_digest=value)])
        for value in ("x", "A" * 64, "a" * 63, "a" * 65, "g" * 64)
    ),
    *(("rollout.canary.percent", [disk(canary=canary(value))]) for value in (0, 100, 1 << 31)),
    *(
        ("rollout.canary.observation", [disk(canary=canary(1, seconds))])
        for seconds in (-1, 86401, 1 << 40)
    ),
    ("rollout.canary", [disk(canary=canary(1), strategy=pb.ROLLOUT_STRATEGY_ALL_AT_ONCE)]),
    ("chunk", [disk(), chunk(0, 0, b"1234")]),
    ("chunk", [disk(), disk()]),
    ("rollout.stream.tensors", [stream()]),
    *(
        ("rollout.stream.tensors[0].name", [stream(tensor(name, [1]))])
        for name in ("", "x" * 513, "__metadata__")
    ),
    ("rollout.stream.tensors[1].name", [stream(tensor("a", [1]), tensor("a", [1]))]),
    *(
        ("rollout.stream.tensors[0].data_type", [stream(tensor("a", [1], value))])
        for value in (0, 77, -1)
    ),
    *(
        ("rollout.stream.tensors[0].shape", [stream(tensor("a", shape))])
        for shape in ([1] * 9, [1 << 60], [1 << 32, 1 << 32], [1 << 63, 1 << 63])
    ),
    *(
        ("rollout.stream.tensors[0].sha256", [stream(tensor("a", [1], sha256=value))])
        for value in (b"x", b"x" * 31, b"x" * 33)
    ),
    ("chunk", [stream(*TWO)]),
    ("chunk", [stream(*TWO), chunk(0, 0, b"1" * 16)]),
    ("chunk", [stream(*TWO), chunk(0, 0, b"1" * 16), chunk(1, 0, b"1" * 5)]),
    ("chunk", [stream(*TWO), chunk(1, 0, b"1" * 6)]),
    ("chunk", [stream(*TWO), chunk(0, 4, b"1" * 12)]),
    ("chunk", [stream(*TWO), chunk(0, 0, b"1" * 8), chunk(0, 0, b"1" * 8)]),
    ("chunk", [stream(*TWO), chunk(0, 0, b"1" * 8), chunk(0, 9, b"1" * 7)]),
    ("chunk", [stream(*TWO), chunk(0, 0, b"1" * 16), chunk(0, 16, b"1")]),
    ("chunk.data", [stream(*TWO), chunk(0, 0, b"")]),
    ("chunk.data", [stream(*TWO), chunk(0, 0, b"1" * 17)]),
    ("chunk.data", [stream(*TWO), chunk(0, 0, b"1" * 8), chunk(0, 8, b"1" * 9)]),
    (
        "chunk",
        [stream(*TWO), chunk(0, 0, b"1" * 16), chunk(1, 0, b"1" * 6), chunk(1, 6, b"1")],
    ),
    ("message", [stream(*TWO), stream(*TWO)]),
    ("message", [stream(*TWO), chunk(0, 0, b"1" * 16), pb.UpdateWeightsRequest()]),
]


async def test_bad_updates_name_the_field_and_change_nothing(tmp_path: Path) -> None:
    assert len(BAD) >= 50
    async with edge(tmp_path) as rig:
        for name, messages in BAD:
            status = await rig.refused(messages)
            assert status.code is grpc.StatusCode.INVALID_ARGUMENT, (name, status)
            assert status.reason == "INVALID_FIELD"
            assert [each.field for each in status.violations] == [name], status
        assert rig.spools() == []
        assert rig.rollouts.rollout is None
        state = (await rig.stub.GetWeights(pb.GetWeightsRequest())).state
        assert not state.HasField("rollout")
        assert [each.phase for each in state.replicas] == [pb.REPLICA_PHASE_CURRENT] * 2


async def test_a_stream_comes_to_every_worker_as_it_was_sent(tmp_path: Path) -> None:
    rng = random.Random(7)
    async with edge(tmp_path) as rig:
        for turn in range(10):
            names = [f"layer.{number}" for number in range(rng.randrange(1, 6))]
            data = {name: rng.randbytes(4 * rng.randrange(0, 300)) for name in names}
            tensors = [
                tensor(name, [len(each) // 4], sha256=hashlib.sha256(each).digest())
                for name, each in data.items()
            ]
            size = rng.choice((1, 7, 64, 5000))
            messages = [stream(*tensors)]
            for index, each in enumerate(data.values()):
                messages += [
                    chunk(index, start, each[start : start + size])
                    for start in range(0, len(each), size)
                ]
            answer = await rig.stub.UpdateWeights(iter(messages))
            assert answer.rollout.target.name == "streamed"
            state = await rig.over()
            assert state.rollout.state == pb.ROLLOUT_STATE_DONE, state
            for worker in rig.workers:
                assert worker.tensors == data
                assert worker.sha256 == {
                    name: hashlib.sha256(each).digest() for name, each in data.items()
                }
            # Those of this rollout, and of that before, to which an operator may go back.
            assert len(rig.spools()) == min(turn + 1, 2)


async def test_what_is_streamed_and_refused_is_gone(tmp_path: Path) -> None:
    async with edge(tmp_path) as rig:
        call = rig.stub.UpdateWeights()
        await call.write(stream(tensor("a", [1000])))
        await call.write(chunk(0, 0, b"1" * 1000))
        async with asyncio.timeout(60):
            while not rig.spools():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            call.cancel()
            while rig.spools():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        status = await rig.refused([stream(tensor("a", [1 << 47]))])
        assert status.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert status.reason == "OUT_OF_MEMORY"
        assert "free" in status.message
        assert rig.spools() == []


async def test_a_second_rollout_waits_for_the_end_of_the_first(tmp_path: Path) -> None:
    async with edge(tmp_path) as rig:
        for worker in rig.workers:
            worker.prepare_seconds = 1e9
        first = await rig.stub.UpdateWeights(iter([disk()]))
        for messages in ([disk("v3")], [stream(*TWO), chunk(0, 0, b"1" * 16)]):
            status = await rig.refused(messages)
            assert status.code is grpc.StatusCode.FAILED_PRECONDITION
            assert status.reason == "ROLLOUT_CONFLICT"
            assert status.metadata == {
                "rollout_id": first.rollout.rollout_id,
                "state": "RUNNING",
            }
        with pytest.raises(grpc.aio.AioRpcError) as wrong:
            await rig.stub.AbortRollout(pb.AbortRolloutRequest(rollout_id="another"))
        assert read(wrong.value).reason == "ROLLOUT_CONFLICT"
        await rig.stub.AbortRollout(pb.AbortRolloutRequest(rollout_id=first.rollout.rollout_id))
        state = await rig.over()
        assert state.rollout.state == pb.ROLLOUT_STATE_ROLLED_BACK
        assert state.rollout.reason == "an operator aborted it"
        assert all(worker.machine.prepared is None for worker in rig.workers)


async def test_pause_and_resume_are_told(tmp_path: Path) -> None:
    async with edge(tmp_path) as rig:
        for refuses in (False, True):
            for _ in range(2):
                await rig.stub.Pause(pb.PauseRequest(refuse_new=refuses))
            state = (await rig.stub.GetWeights(pb.GetWeightsRequest())).state
            assert state.is_paused and all(each.is_paused for each in state.replicas)
            if refuses:
                with pytest.raises(EnginePaused):
                    rig.fleet.check_room()
            else:
                rig.fleet.check_room()
            for _ in range(2):
                await rig.stub.Resume(pb.ResumeRequest())
            rig.fleet.check_room()
            state = (await rig.stub.GetWeights(pb.GetWeightsRequest())).state
            assert not state.is_paused and not any(each.is_paused for each in state.replicas)
        with pytest.raises(grpc.aio.AioRpcError) as wrong:
            await rig.stub.Pause(pb.PauseRequest(in_flight=9))
        assert [each.field for each in read(wrong.value).violations] == ["in_flight"]


async def test_without_workers_nobody_can_say_what_serves(tmp_path: Path) -> None:
    async with edge(tmp_path, 0) as rig:
        status = await rig.refused([disk()])
        assert status.code is grpc.StatusCode.UNAVAILABLE
        assert status.reason == "NO_WORKER" and status.retry_after
