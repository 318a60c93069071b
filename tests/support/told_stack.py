"""A client edge, a fleet and a simulated worker on one loop, wired as app.py wires telemetry."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count

import grpc

from bench.inprocess import InProcessWorker
from control_plane.core.claim import ClaimPolicy
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.door import EngineDoor
from control_plane.rpc.errors import CODES, REASONS, status_of
from control_plane.rpc.inference_servicer import InferenceServicer
from control_plane.rpc.request_log import RequestLog
from control_plane.rpc.server import INFERENCE_METHODS
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits, TextProcessor
from twinplane.grpc.interceptors import CallEnd, StatusInterceptor
from twinplane.inference.v1 import inference_pb2_grpc
from worker_service.domain.capability import Limits
from worker_service.facade import WorkerFacade
from worker_service.simulated.runner import SimulatedLatency, SimulatedModel, SimulatedRunner

LENGTH = 256
LIMITS = Limits(
    max_sequence_count=4,
    max_step_token_count=64,
    max_sequence_token_count=LENGTH,
    max_prompt_token_count=LENGTH,
)


@dataclass
class ToldStack:
    """`ends` are the calls that have ended, in order."""

    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    fleet: Fleet
    telemetry: Telemetry
    ends: list[CallEnd]
    counted: asyncio.Event

    async def submitted(self, name: str) -> None:
        """Waits until a request of this id runs or waits."""
        async with asyncio.timeout(120):
            while name not in self.fleet._requests:  # noqa: ASYNC110
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
async def told_stack(
    text_model: TextModel, *, step_seconds: float = 0.0, waiting: int = 1024
) -> AsyncIterator[ToldStack]:
    """At its end nothing may be held any more. `waiting`: places in the queue."""
    model = SimulatedModel(
        "told", text_model.tokenizer.token_count, LIMITS, block_count=400, block_size=8
    )
    worker = WorkerFacade(
        lambda: SimulatedRunner(model, SimulatedLatency(step_seconds, 0.0, 0.0, 0.0)),
        worker_id="w",
        incarnation_id="i",
    )
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
        ReplicaSettings(
            SchedulingSettings(max_waiting_count=waiting),
            claim=ClaimPolicy(),
            check_invariants=True,
        ),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=telemetry,
        on_readiness=lambda is_ready: ready.set() if is_ready else ready.clear(),
    )
    names = count(1)
    text = TextProcessor(text_model, TextLimits(), None)
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
            yield ToldStack(stub, fleet, telemetry, ends, counted)
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
