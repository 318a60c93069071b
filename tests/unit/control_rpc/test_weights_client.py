"""Updates on their way to a worker: spooled files in chunks, sources as messages, and refusals; and
a fleet of two whose weights are exchanged under traffic, over gRPC and simulated workers.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core.events import Finish
from control_plane.core.request import Request, RequestId, SamplingParams, StopConditions
from control_plane.core.weights import (
    DiskSource,
    DistributedSource,
    InFlightPolicy,
    Placement,
    SharedMemorySource,
    SpooledSource,
    TensorDescription,
    WeightsUpdate,
)
from control_plane.observability.metrics import Telemetry
from control_plane.rpc import weights_client
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.fleet import Fleet
from control_plane.shell.ports import PreparedUpdate, RefusalReason, WorkerLost, WorkerRefused
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream
from tests.support.quick import examples
from tests.support.simulated_tokens import expected_tokens
from tests.support.worker_rig import (
    MODEL,
    VOCABULARY,
    WEIGHTS,
    serving,
)
from worker_service.domain.sampling import SamplingParameters
from worker_service.facade import WorkerFacade
from worker_service.rpc.server import WorkerServer
from worker_service.simulated.runner import SimulatedLatency, SimulatedRunner
from worker_service.simulated.weights import salt_of

FORMATS = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "BF16": ("bfloat16", 2),
    "F16": ("float16", 2),
}

Tensors = list[tuple[str, str, tuple[int, ...], bytes]]
"""Name, format, shape and bytes."""


def drawn(seed: int) -> Tensors:
    chance = random.Random(seed)
    tensors: Tensors = []
    for number in range(chance.randint(1, 6)):
        kind = chance.choice(list(FORMATS))
        shape = tuple(chance.choice((1, 1, 2, 3, 7, 40)) for _ in range(chance.randint(0, 3)))
        if chance.random() < 0.2:
            shape = (chance.choice((1, 2)) * 2**18 + chance.randint(-1, 1),)
        size = FORMATS[kind][1]
        for dimension in shape:
            size *= dimension
        tensors.append((f"layer.{number}.weight", kind, shape, chance.randbytes(size)))
    return tensors


def spooled(path: Path, tensors: Tensors, chance: random.Random) -> SpooledSource:
    """A safetensors file; its header names the tensors in any order."""
    entries, start = [], 0
    for name, kind, shape, data in tensors:
        entry = {"dtype": kind, "shape": shape, "data_offsets": [start, start + len(data)]}
        entries.append((name, entry))
        start += len(data)
    chance.shuffle(entries)
    header = json.dumps({"__metadata__": {"format": "pt"}, **dict(entries)}).encode()
    body = b"".join(data for _, _, _, data in tensors)
    path.write_bytes(len(header).to_bytes(8, "little") + header + body)
    digests = tuple((name, hashlib.sha256(data).digest()) for name, _, _, data in tensors)
    return SpooledSource(str(path), digests)


@settings(max_examples=examples(60), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_chunks_of_a_spool_are_its_tensors_in_order(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    tensors = drawn(seed)
    path = tmp_path_factory.mktemp("spool") / "weights.safetensors"
    source = spooled(path, tensors, random.Random(seed))

    async def read() -> None:
        spool = weights_client.Spool(source)
        found = [bytearray() for _ in tensors]
        at = (0, 0)
        async for chunk in spool.chunks():
            assert 0 < len(chunk.data) <= weights_client.CHUNK_BYTES
            assert (chunk.tensor_index, chunk.offset) >= at
            assert chunk.offset == len(found[chunk.tensor_index])
            found[chunk.tensor_index] += chunk.data
            at = (chunk.tensor_index, chunk.offset + len(chunk.data))
        assert found == [data for _, _, _, data in tensors]
        told = [tensor for tensor, _, _ in spool.tensors]
        assert told == [
            TensorDescription(name, FORMATS[kind][0], shape, hashlib.sha256(data).digest())
            for name, kind, shape, data in tensors
        ]
        await spool.close()

    asyncio.run(read())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        (2**40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{",
        (9).to_bytes(8, "little") + b'{"a": {}}',
        *(
            len(header).to_bytes(8, "little") + header
            for header in (
                b'{"a": {"dtype": "I8", "shape": [1], "data_offsets": [0, 1]}}',
                b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
                b'{"a": {"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}}',
                b'{"a": 7}',
            )
        ),
    ],
)
def test_what_is_no_spool_is_said_to_be_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(weights_client.SpoolUnusable, match=r"weights\.safetensors"):
        weights_client.Spool(SpooledSource(str(path)))


def test_sources_as_messages() -> None:
    tensor = TensorDescription("a", "bfloat16", (2, 3), b"d" * 32)
    group = DistributedSource("h:1", 4, 2, 1, "nccl", "k", (tensor,), 1024, 1.5)
    told = weights_client.update_to_pb(7, WeightsUpdate("u", group, True, Placement.IN_PLACE, "ab"))
    assert (told.epoch, told.update_id, told.is_partial, told.expected_digest) == (
        7, "u", True, "ab",
    )  # fmt: skip
    assert told.placement == weights_client.weights_pb2.WEIGHTS_PLACEMENT_IN_PLACE
    sent = told.distributed
    assert (sent.address, sent.world_size, sent.rank, sent.source_rank) == ("h:1", 4, 2, 1)
    assert (sent.key, sent.bucket_bytes, sent.timeout.ToTimedelta().total_seconds()) == (
        "k", 1024, 1.5,
    )  # fmt: skip
    assert sent.tensors[0].name == "a" and list(sent.tensors[0].shape) == [2, 3]
    shared = SharedMemorySource(64, ((tensor, 16),), posix_name="/w")
    told = weights_client.update_to_pb(7, WeightsUpdate("u", shared))
    assert told.ipc.posix.name == "/w" and told.ipc.tensors[0].offset == 16
    shared = SharedMemorySource(64, ((tensor, 16),), cuda_handle=b"h", cuda_device_uuid="gpu")
    told = weights_client.update_to_pb(7, WeightsUpdate("u", shared))
    assert (told.ipc.cuda.handle, told.ipc.cuda.device_uuid) == (b"h", "gpu")
    told = weights_client.update_to_pb(7, WeightsUpdate("u", DiskSource("x")))
    assert told.disk.path == "x" and told.WhichOneof("source") == "disk"


async def test_a_worker_takes_a_spool_and_tells_what_waits(tmp_path: Path) -> None:
    chance = random.Random(5)
    source = spooled(tmp_path / "w.safetensors", drawn(5), chance)
    async with serving() as rig:
        worker = GrpcWorker(rig.address, controller_id="test")
        for call in (worker.prepare(WeightsUpdate("u", source)), worker.abort("u")):
            with pytest.raises(WorkerLost, match="not attached"):
                await call
        await worker.attach()
        prepared = await worker.prepare(WeightsUpdate("u", source))
        assert prepared.update_id == "u" and prepared.placement is Placement.BESIDE
        told = PreparedUpdate("u", prepared.digest)
        assert (await worker.attach()).info.prepared == told
        with pytest.raises(WorkerRefused) as refused:
            await worker.commit("other", prepared.digest)
        assert refused.value.reason is RefusalReason.UPDATE_CONFLICT
        with pytest.raises(WorkerRefused) as refused:
            await worker.prepare(WeightsUpdate("other", source))
        assert refused.value.reason is RefusalReason.UPDATE_CONFLICT
        version = await worker.commit("u", prepared.digest)
        assert (version.generation, version.digest) == (2, prepared.digest)
        assert await worker.commit("u", prepared.digest) == version, "the same answer again"
        await worker.prepare(WeightsUpdate("v", source))
        await worker.abort("v")
        await worker.abort("v")
        attachment = await worker.attach()
        assert attachment.info.prepared is None and attachment.info.weight_version == version
        await worker.detach()


@pytest.mark.parametrize("kind", ["digest", "truncated", "missing"])
async def test_a_spool_that_is_wrong_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "w.safetensors"
    source = spooled(path, drawn(9), random.Random(9))
    match kind:
        case "digest":
            source = replace(source, sha256=tuple((name, b"x" * 32) for name, _ in source.sha256))
        case "truncated":
            path.write_bytes(path.read_bytes()[:-1])
        case _:
            path.unlink()
    async with serving() as rig:
        worker = GrpcWorker(rig.address, controller_id="test")
        await worker.attach()
        with pytest.raises(WorkerRefused) as refused:
            await worker.prepare(WeightsUpdate("u", source))
        assert refused.value.reason is RefusalReason.INVALID_UPDATE, refused.value
        assert (await worker.attach()).info.prepared is None
        await worker.detach()


@asynccontextmanager
async def listening(name: str, build: Callable[[], SimulatedRunner]) -> AsyncIterator[str]:
    """The address of a worker of this name."""
    facade = WorkerFacade(build, worker_id=name, incarnation_id=name)
    server = WorkerServer(facade)
    address = await server.start("127.0.0.1", 0)
    try:
        await facade.load()
        yield address
    finally:
        facade.drain()
        server.end_streams()
        await asyncio.wait_for(facade.close(), 10.0)
        await server.stop(1.0)


class Client:
    """Reads one stream."""

    def __init__(self, fleet: Fleet, number: int, count: int, arrival: float) -> None:
        self.prompt = [2 + number, 3, 5, 7]
        self.tokens: list[int] = []
        self.finish: Finish | None = None
        stream = TokenStream()
        request = Request(
            request_id=RequestId(f"r{number} {arrival}"),
            prompt_token_ids=self.prompt,
            sampling=SamplingParams(temperature=0.0),
            seed=0,
            stop=StopConditions(count),
            arrival=arrival,
        )
        fleet.submit(request, stream)
        self.task = asyncio.create_task(self._read(stream))

    async def _read(self, stream: TokenStream) -> None:
        while self.finish is None:
            delta = await stream.take()
            self.tokens += delta.tokens.ids
            self.finish = delta.finish

    def is_right(self) -> bool:
        """Each span's tokens are those of a worker that always had its weights."""
        assert self.finish is not None
        right: list[int] = []
        for span in self.finish.spans:
            first = span.weights_digest == WEIGHTS.digest
            salt = 0 if first else salt_of(span.weights_digest)
            right += expected_tokens(
                [*self.prompt, *right],
                span.token_count,
                SamplingParameters(temperature=0.0),
                VOCABULARY,
                salt=salt,
            )
        return self.tokens == right


@pytest.mark.parametrize("policy", [InFlightPolicy.CONTINUE_ON_NEW, InFlightPolicy.FINISH_ON_OLD])
async def test_two_replicas_are_updated_again_and_again_under_streams(
    tmp_path: Path, policy: InFlightPolicy
) -> None:
    chance = random.Random(3)
    sources = [
        spooled(tmp_path / f"{number}.safetensors", drawn(number), chance) for number in range(5)
    ]
    latency = SimulatedLatency(0.002, 0.0, 0.0, 0.0)

    def build() -> SimulatedRunner:
        return SimulatedRunner(MODEL, latency)

    async with AsyncExitStack() as stack:
        names = ("one", "two")
        addresses = [await stack.enter_async_context(listening(name, build)) for name in names]
        workers = [GrpcWorker(address, controller_id="test") for address in addresses]
        loop = asyncio.get_running_loop()
        fleet = Fleet(
            workers,
            ReplicaSettings(check_invariants=True),
            clock=loop.time,
            jitter=random.Random(0).random,
            metrics=Telemetry("0"),
            on_readiness=lambda ready: None,
        )
        running = asyncio.create_task(fleet.run())
        try:
            while not all(replica.attached for replica in fleet.replicas):
                assert not running.done()
                await asyncio.sleep(0.01)
            done: list[Client] = []
            clients = [Client(fleet, number, 24, loop.time()) for number in range(16)]
            served = {WEIGHTS.digest}
            for number, source in enumerate(sources):
                for replica in fleet.replicas:
                    update = WeightsUpdate(f"u{number}", source)
                    prepared = await replica.weights.prepare(update)
                    served.add(prepared.digest)
                    fleet.weights.served.serve(
                        served, continues=policy is InFlightPolicy.CONTINUE_ON_NEW
                    )
                    version = await replica.weights.switch(
                        prepared.update_id, prepared.digest, policy
                    )
                    assert version.generation == number + 2
                    ended = [client for client in clients if client.task.done()]
                    done += ended
                    clients = [client for client in clients if not client.task.done()]
                    clients += [
                        Client(fleet, index, 24, loop.time()) for index in range(len(ended))
                    ]
            await asyncio.wait_for(asyncio.gather(*(client.task for client in clients)), 60.0)
            done += clients
            assert all(client.is_right() for client in done)
            several = [c for c in done if c.finish is not None and len(c.finish.spans) > 1]
            assert bool(several) == (policy is InFlightPolicy.CONTINUE_ON_NEW)
            late = Client(fleet, 90, 24, loop.time())
            await asyncio.wait_for(late.task, 60.0)
            assert late.is_right() and late.finish is not None
            assert [span.weights_digest for span in late.finish.spans] == [prepared.digest]
            for replica in fleet.replicas:
                stats = replica.stats()
                assert stats is not None
                assert not (stats.running or stats.waiting or stats.kv_active_tokens)
        finally:
            running.cancel()
            await asyncio.wait([running])


async def test_a_refusal_in_the_midst_of_a_large_spool_is_told_each_time(tmp_path: Path) -> None:
    """Though gRPC may lose its reason when a chunk is on its way."""
    tensors: Tensors = [
        (f"t{number}", "F32", (2**18,), bytes([number]) * 2**20) for number in range(12)
    ]
    source = spooled(tmp_path / "w.safetensors", tensors, random.Random(1))
    wrong = tuple((name, b"x" * 32 if name == "t3" else digest) for name, digest in source.sha256)
    async with serving() as rig:
        worker = GrpcWorker(rig.address, controller_id="test")
        await worker.attach()
        for _ in range(12):
            with pytest.raises(WorkerRefused) as refused:
                await worker.prepare(WeightsUpdate("u", replace(source, sha256=wrong)))
            assert refused.value.reason is RefusalReason.INVALID_UPDATE
        await worker.prepare(WeightsUpdate("u", source))
        await worker.detach()
