"""Both planes on one event loop: a model folder in, a client's stub out.

Everything is real but the processes and the wire between the planes.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import grpc

from bench.inprocess import InProcessWorker
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.errors import status_of
from control_plane.rpc.inference_servicer import InferenceServicer
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.text.model_files import load_text_model
from control_plane.text.processor import TextLimits, TextProcessor
from control_plane.text.template_pool import TemplatePool
from tests.support import runner_rig
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc
from worker_service.facade import WorkerFacade


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
    """A served model. `fleet` and `worker` are there for their books."""

    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    fleet: Fleet
    worker: WorkerFacade

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
    worker = WorkerFacade(lambda: runner_rig.build(folder), worker_id="w", incarnation_id="i")
    await worker.load()
    ready = asyncio.Event()
    fleet = Fleet(
        [InProcessWorker(worker)],
        ReplicaSettings(
            SchedulingSettings(max_waiting_count=max_waiting_count), check_invariants=True
        ),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("test"),
        on_readiness=lambda is_ready: ready.set() if is_ready else ready.clear(),
    )
    names = iter(range(1, 1_000_000))
    servicer = InferenceServicer(
        fleet,
        text,
        clock=time.monotonic,
        new_seed=lambda: 7,
        new_request_id=lambda: f"made-{next(names)}",
    )
    server = grpc.aio.server(
        interceptors=[StatusInterceptor(status_of, lambda end: None, lambda: "error-1")]
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    running = asyncio.create_task(fleet.run())
    try:
        await server.start()
        await ready.wait()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Stack(inference_pb2_grpc.InferenceServiceStub(channel), fleet, worker)
        stats = fleet.replicas[0].stats()
        assert stats is not None
        assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)
    finally:
        await server.stop(0)
        running.cancel()
        await asyncio.wait([running])
        await worker.close()
        text.close()
