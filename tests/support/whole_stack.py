"""Both planes on one event loop: a model folder in, a client's stub out.

Everything is real but the processes and the wire between the planes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

import grpc

from bench.inprocess import InProcessWorker
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.door import EngineDoor
from control_plane.rpc.errors import CODES, REASONS, status_of
from control_plane.rpc.inference_servicer import InferenceServicer
from control_plane.rpc.request_log import RequestLog
from control_plane.rpc.server import INFERENCE_METHODS
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.text.model_files import TextModel, load_text_model
from control_plane.text.processor import TextLimits, TextProcessor
from control_plane.text.template_pool import TemplatePool
from tests.support import runner_rig
from twinplane.grpc.interceptors import CallEnd, StatusInterceptor
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc
from worker_service.domain.capability import Limits
from worker_service.facade import WorkerFacade
from worker_service.runner.interface import Runner
from worker_service.simulated.runner import SimulatedLatency, SimulatedModel, SimulatedRunner

LENGTH = 256
LIMITS = Limits(
    max_sequence_count=4,
    max_step_token_count=64,
    max_sequence_token_count=LENGTH,
    max_prompt_token_count=LENGTH,
)


@dataclass(frozen=True)
class Answer:
    """A generation as its client saw it. `texts` are those of its messages."""

    texts: tuple[str, ...]
    token_ids: tuple[int, ...]
    finished: pb.GenerationFinished

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reason(self) -> str:
        """How it ended: STOP or LENGTH."""
        return pb.FinishReason.Name(self.finished.reason).removeprefix("FINISH_REASON_")


@dataclass(frozen=True)
class Stack:
    """A served model. `fleet`, `worker` and `telemetry` are there for their books.

    `ends` are the calls that have ended, in order.
    """

    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    fleet: Fleet
    worker: WorkerFacade
    telemetry: Telemetry
    ends: list[CallEnd]
    counted: asyncio.Event

    async def generate(self, **fields: object) -> Answer:
        """A greedy generation from text, token_ids or chat; stop as a StopConditions."""
        texts: list[str] = []
        tokens: list[int] = []
        request = pb.GenerateRequest(**fields)  # type: ignore[arg-type]
        request.sampling.temperature = 0.0
        async for response in self.stub.Generate(request):
            match response.WhichOneof("event"):
                case "delta":
                    texts.append(response.delta.text)
                    tokens += response.delta.token_ids
                case "finished":
                    return Answer(tuple(texts), tuple(tokens), response.finished)
                case _:
                    pass
        raise AssertionError("a stream without an end")

    async def submitted(self, name: str) -> None:
        """Waits until a request of this id runs or waits."""
        async with asyncio.timeout(120):
            while name not in self.fleet.register.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def idle(self) -> None:
        """Waits until nothing runs or waits any more."""
        async with asyncio.timeout(120):
            while (stats := self.fleet.replicas[0].stats()) and (stats.running or stats.waiting):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def ended(self, call_count: int) -> None:
        """Waits until so many calls are over."""
        async with asyncio.timeout(120):
            while len(self.ends) < call_count:
                self.counted.clear()
                await self.counted.wait()


@asynccontextmanager
async def serving(
    folder: Path, text_folder: Path | None = None, max_waiting_count: int = 256
) -> AsyncIterator[Stack]:
    """Serves the model; at the end nothing may be held any more.

    `text_folder`: where the tokenizer is, if not beside the weights.
    """
    model = load_text_model(text_folder or folder)
    limits = TextLimits()
    pool = None
    if model.template is not None:
        pool = TemplatePool(model.template, limits.rendering, now=datetime.now)
    text = TextProcessor(model, limits, pool)
    async with _wired(lambda: runner_rig.build(folder), text, max_waiting_count) as stack:
        yield stack


@asynccontextmanager
async def simulating(
    text_model: TextModel, *, step_seconds: float = 0.0, waiting: int = 1024
) -> AsyncIterator[Stack]:
    """Serves a simulated model of this vocabulary. `waiting`: places in the queue."""
    model = SimulatedModel(
        "told", text_model.tokenizer.token_count, LIMITS, block_count=400, block_size=8
    )
    latency = SimulatedLatency(step_seconds, 0.0, 0.0, 0.0)
    text = TextProcessor(text_model, TextLimits(), None)
    async with _wired(lambda: SimulatedRunner(model, latency), text, waiting) as stack:
        yield stack


@asynccontextmanager
async def _wired(
    build: Callable[[], Runner], text: TextProcessor, waiting: int
) -> AsyncIterator[Stack]:
    """Wired as app.py does it. At its end nothing may be held any more, and `text` is closed."""
    worker = WorkerFacade(build, worker_id="w", incarnation_id="i")
    await worker.load()
    telemetry = Telemetry("0", methods=INFERENCE_METHODS, codes=CODES, reasons=REASONS)
    request_log = RequestLog()
    ready, counted = asyncio.Event(), asyncio.Event()
    ends: list[CallEnd] = []

    def on_call(end: CallEnd) -> None:
        telemetry.rpc_finished(end.method, end.code, end.reason, end.seconds)
        request_log.call_ended(end)
        ends.append(end)
        counted.set()

    fleet = Fleet(
        [InProcessWorker(worker)],
        ReplicaSettings(SchedulingSettings(max_waiting_count=waiting), check_invariants=True),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=telemetry,
        on_readiness=lambda is_ready: ready.set() if is_ready else ready.clear(),
    )
    names = count(1)
    servicer = InferenceServicer(
        fleet,
        text,
        clock=time.monotonic,
        new_seed=lambda: 7,
        new_request_id=lambda: f"made-{next(names)}",
    )
    server = grpc.aio.server(
        interceptors=[
            StatusInterceptor(status_of, on_call, lambda: "error-1", door=EngineDoor(fleet))
        ]
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    running = asyncio.create_task(fleet.run())
    await server.start()
    try:
        await ready.wait()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield Stack(stub, fleet, worker, telemetry, ends, counted)
            stats = fleet.replicas[0].stats()
        assert stats is not None
        assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)
    finally:
        await server.stop(0)
        running.cancel()
        await asyncio.wait([running])
        request_log.close()
        text.close()
        await worker.close()
