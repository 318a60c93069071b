"""Every number of a request at its extremes, through edge, fleet, contract, rows and sampler.

Each request is answered or refused by the name of its field. Nothing reaches a worker that it
refuses: the claim of the start is that of the end, and the streams beside get the same tokens.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import grpc
from google.protobuf.message import Message

from bench.inprocess import InProcessWorker
from control_plane.core import invariants
from control_plane.core.events import Stats
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.errors import status_of
from control_plane.rpc.inference_servicer import InferenceServicer
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.text.model_files import load_text_model
from control_plane.text.processor import TextLimits, TextProcessor
from tests.simulation.rig import until
from tests.support import runner_rig, tiny_llama
from tests.support.edge_rig import generate_request, refused
from tests.unit.control_rpc.test_bounds import CASES
from twinplane.common.v1.types_pb2 import SamplingParameters, TokenIds
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.inference.v1 import inference_pb2, inference_pb2_grpc
from twinplane.inference.v1.inference_pb2 import StopConditions
from worker_service.facade import WorkerFacade

VOCABULARY = 259
LENGTH = tiny_llama.MAX_LENGTH
PROMPT = [72, 101, 108]
ROOM = LENGTH - len(PROMPT)
NEIGHBOUR_TOKENS = 120

Request = inference_pb2.GenerateRequest


def asking(**fields: object) -> Request:
    """A valid request of few tokens but for the given fields."""
    fields.setdefault("token_ids", TokenIds(ids=PROMPT))
    fields.setdefault("stop", StopConditions(max_tokens=3))
    return generate_request(**fields)


def stop(**fields: object) -> Request:
    return asking(stop=StopConditions(**({"max_tokens": 3} | fields)))  # type: ignore[arg-type]


REQUESTS: dict[str, tuple[str, Request]] = {
    **{
        f"{name} {value!r}": (
            f"sampling.{name}",
            asking(sampling=SamplingParameters(**{name: value})),  # type: ignore[arg-type]
        )
        for name, value in CASES
    },
    **{
        f"max_tokens {most}": ("stop.max_tokens", stop(max_tokens=most))
        for most in (0, 1, 2, ROOM - 1, ROOM, ROOM + 1, 2**31 - 1, 2**31, 2**32 - 1)
    },
    **{
        f"stop token {token}": ("stop.token_ids", stop(token_ids=[token]))
        for token in (0, VOCABULARY - 1, VOCABULARY, 2**31 - 1, 2**31, 2**32 - 1)
    },
    **{
        f"prompt token {token}": ("token_ids", asking(token_ids=TokenIds(ids=[5, token])))
        for token in (0, VOCABULARY - 1, VOCABULARY, 2**31 - 1, 2**31, 2**32 - 1)
    },
    **{
        f"prompt of {length}": ("token_ids", asking(token_ids=TokenIds(ids=[7] * length)))
        for length in (0, 1, LENGTH - 3, LENGTH, LENGTH + 1)
    },
    **{
        f"priority {priority}": ("priority", asking(priority=priority))
        for priority in (-(2**31), -101, -100, -1, 0, 1, 100, 101, 2**31 - 1)
    },
    **{
        f"salt {salt[:1]!r} {len(salt)}": ("cache_salt", asking(cache_salt=salt))
        for salt in ("", "\0", "\0" * 128, "é" * 64, "é" * 65, "\U0010ffff" * 32, "s" * 100_000)
    },
    "all at once": (
        "",
        asking(
            sampling=SamplingParameters(
                temperature=1e-45, top_k=2**32 - 1, top_p=1e-45, min_p=1.0, seed=2**64 - 1
            ),
            priority=100,
        ),
    ),
}
TIMEOUTS = (1e-9, 1e-6, 1e-4, 0.01, 1e5, 1e8)


@dataclass
class Stack:
    """Both planes over a real tiny model; between them the wire's bytes, but no socket."""

    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    fleet: Fleet
    worker: WorkerFacade

    async def tokens(self, request: Request, seconds: float | None = None) -> list[int]:
        """All of a generation's. Raises AioRpcError."""
        ids: list[int] = []
        finished = False
        async for message in self.stub.Generate(request, timeout=seconds):
            ids += message.delta.token_ids
            finished |= message.WhichOneof("event") == "finished"
        assert finished
        return ids


@asynccontextmanager
async def stack(model: Path, text_folder: Path) -> AsyncIterator[Stack]:
    worker = WorkerFacade(lambda: runner_rig.build(model), worker_id="w", incarnation_id="i")
    await worker.load()
    ready = asyncio.Event()
    fleet = Fleet(
        [InProcessWorker(worker)],
        ReplicaSettings(SchedulingSettings(max_waiting_count=10_000), check_invariants=True),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("test"),
        on_readiness=lambda is_ready: ready.set() if is_ready else ready.clear(),
    )
    text = TextProcessor(load_text_model(text_folder), TextLimits(), None)
    names = count()
    servicer = InferenceServicer(
        fleet,
        text,
        clock=time.monotonic,
        new_seed=lambda: 7,
        new_request_id=lambda: f"made-{next(names)}",
    )
    server = grpc.aio.server(
        interceptors=[StatusInterceptor(status_of, lambda method, code: None, lambda: "error")]
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    running = asyncio.create_task(fleet.run())
    await server.start()
    try:
        await ready.wait()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield Stack(stub, fleet, worker)
    finally:
        await server.stop(0)
        running.cancel()
        await asyncio.wait([running])
        text.close()
        await worker.close()


def neighbours() -> list[Request]:
    """A greedy stream and a drawn one."""
    ends = StopConditions(max_tokens=NEIGHBOUR_TOKENS, ignore_end_of_sequence=True)
    return [
        asking(sampling=SamplingParameters(temperature=0), stop=ends),
        asking(sampling=SamplingParameters(temperature=1.5, top_p=0.9, seed=11), stop=ends),
    ]


def is_idle(stats: Stats | None) -> bool:
    return stats is not None and not stats.running and not stats.inflight


async def outcome(made: Stack, field: str, request: Message) -> str:
    assert isinstance(request, Request)
    try:
        ids = await made.tokens(request)
    except grpc.aio.AioRpcError as error:
        why = refused(error)
        assert why.code is grpc.StatusCode.INVALID_ARGUMENT, why
        assert why.fields == [field]
        return "refused"
    assert all(0 <= token < VOCABULARY for token in ids) and ids
    return "answered"


async def test_every_extreme_is_answered_or_refused_by_name(
    tmp_path: Path, tiny_model: Path
) -> None:
    model = tmp_path / "llama"
    tiny_llama.save(tiny_llama.llama(vocab_size=VOCABULARY), model)
    async with stack(model, tiny_model) as made:
        alone = [await made.tokens(request) for request in neighbours()]
        beside = [asyncio.create_task(made.tokens(request)) for request in neighbours()]
        outcomes = await asyncio.gather(
            *(outcome(made, field, request) for field, request in REQUESTS.values())
        )
        assert [await task for task in beside] == alone, "a neighbour's stream changed"
        assert outcomes.count("answered") > 60 and outcomes.count("refused") > 40
        beside = [asyncio.create_task(made.tokens(request)) for request in neighbours()]
        for timeout in TIMEOUTS:
            try:
                await made.tokens(asking(), timeout)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                assert timeout < 1e5
        assert [await task for task in beside] == alone
        assert made.worker.worker_info().epoch == 1, "a worker refused what the edge had accepted"
        replica = made.fleet.replicas[0]
        await until(lambda: is_idle(replica.stats()))
        stats = replica.stats()
        assert stats is not None and stats.waiting == stats.kv_active_tokens == 0
        invariants.check(replica._core)  # type: ignore[arg-type]
