"""A control plane in this process over worker processes, so that its books can be looked at."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

import grpc

from control_plane.observability.metrics import Telemetry
from control_plane.rpc.errors import CODES, REASONS, status_of
from control_plane.rpc.inference_servicer import InferenceServicer
from control_plane.rpc.server import INFERENCE_METHODS
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.text.model_files import load_text_model
from control_plane.text.processor import TextLimits, TextProcessor
from control_plane.text.template_pool import TemplatePool
from tests.simulation.rig import number_of
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.inference.v1 import inference_pb2_grpc

ATTACH_SECONDS = 120.0
BACK_SECONDS = 1.0
"""After so long everything that an end frees is free."""


@dataclass(frozen=True)
class Held:
    """What one replica holds, and how many tasks run."""

    running: int
    waiting: int
    kv_active_tokens: int
    free_rows: int
    free_blocks: int


@dataclass(frozen=True)
class Stack:
    """A control plane that serves."""

    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    fleet: Fleet

    async def attached(self) -> None:
        """Waits until each worker is."""
        async with asyncio.timeout(ATTACH_SECONDS):
            while not all(replica.attached for replica in self.fleet.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def idle(self) -> None:
        """Waits until no replica has anything to do."""
        async with asyncio.timeout(ATTACH_SECONDS):
            while any(replica._core.has_work for replica in self.fleet.replicas):  # type: ignore[union-attr]  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    def held(self) -> list[Held]:
        """What each replica holds."""
        found = []
        for replica in self.fleet.replicas:
            core = replica._core
            assert core is not None
            stats, ledger = core.stats(), core.ledger
            found.append(
                Held(
                    stats.running,
                    stats.waiting,
                    stats.kv_active_tokens,
                    len(ledger.free_rows),
                    ledger.pool.free_count,
                )
            )
        return found

    async def idle_again(self, before: list[Held], task_count: int) -> float:
        """Waits until all is as before. Returns the seconds it took; raises after too many."""
        started = time.monotonic()
        while self.held() != before or task_count_of_control_plane() > task_count:
            waited = time.monotonic() - started
            assert waited < 10.0, f"{self.held()} is not {before}; {task_count_of_control_plane()}"
            await asyncio.sleep(0.01)
        return time.monotonic() - started

    def victims(self, number: int) -> set[str]:
        """The ids of the requests that are with a replica."""
        requests = self.fleet.register.requests
        return {str(name) for name in requests if number_of(self.fleet, name) == number}


def task_count_of_control_plane() -> int:
    """Tasks that run the control plane's own code."""
    count = 0
    for task in asyncio.all_tasks():
        code = getattr(task.get_coro(), "cr_code", None)
        count += code is not None and "control_plane" in code.co_filename
    return count


@asynccontextmanager
async def control_plane(model: Path, addresses: Sequence[str]) -> AsyncIterator[Stack]:
    """Serves what these workers serve; `model` has its tokenizer."""
    text_model = load_text_model(model)
    limits = TextLimits()
    pool = None
    if text_model.template is not None:
        pool = TemplatePool(text_model.template, limits.rendering, now=datetime.now)
    text = TextProcessor(text_model, limits, pool)
    fleet = Fleet(
        [GrpcWorker(address, controller_id="chaos", attach_timeout=5.0) for address in addresses],
        ReplicaSettings(SchedulingSettings(), check_invariants=True),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("0", methods=INFERENCE_METHODS, codes=CODES, reasons=REASONS),
        on_readiness=lambda ready: None,
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
        interceptors=[StatusInterceptor(status_of, lambda end: None, lambda: "error-1")]
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    running = asyncio.create_task(fleet.run())
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stack = Stack(inference_pb2_grpc.InferenceServiceStub(channel), fleet)
            await stack.attached()
            yield stack
            assert not running.done(), "the fleet has stopped"
    finally:
        await server.stop(0)
        running.cancel()
        await asyncio.wait([running])
        text.close()
