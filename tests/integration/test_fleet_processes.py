"""Real worker processes under one control plane: one request that kills them, SIGTERM, SIGSTOP."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tests.chaos.stack import Stack, control_plane
from tests.chaos.streams import answer, asked, cases
from tests.support.planes import STOP_SECONDS, Plane, free_port
from tests.support.tiny_model import write_tiny_model

pytestmark = pytest.mark.slow

COUNT = 31
TOKENS = 60
DEADLY_SEED = 666
# The process dies in the step that adds a request of this seed, as over a bug of a kernel.
DEADLY = f"""
import os, signal
from worker_service.simulated.runner import SimulatedRunner
launch = SimulatedRunner.launch
def deadly(self, plan):
    if any(added.sampling.seed == {DEADLY_SEED} for added in plan.added):
        os.kill(os.getpid(), signal.SIGKILL)
    return launch(self, plan)
SimulatedRunner.launch = deadly
"""


@dataclass(slots=True, eq=False)
class Workers:
    """Two workers, each started again whenever it has ended."""

    folder: Path
    model: Path
    ports: tuple[int, int]
    planes: list[Plane]
    end_count: int = 0

    def start(self, number: int) -> Plane:
        return Plane(
            ["worker", f"--model={self.model}", f"--port={self.ports[number]}", "--simulate",
             "--simulate-step-ms=5"],
            self.folder / f"worker-{number}-{self.end_count}.log",
            prelude=DEADLY,
        )  # fmt: skip

    async def keep(self) -> None:
        while True:
            await asyncio.sleep(0.02)
            for number, plane in enumerate(self.planes):
                if plane.process.poll() is not None:
                    self.end_count += 1
                    self.planes[number] = self.start(number)


@asynccontextmanager
async def fleet(folder: Path) -> AsyncIterator[tuple[Stack, Workers]]:
    model = write_tiny_model(folder / "model")
    workers = Workers(folder, model, (free_port(), free_port()), [])
    workers.planes = [workers.start(number) for number in (0, 1)]
    keeping = asyncio.create_task(workers.keep())
    try:
        addresses = [f"127.0.0.1:{port}" for port in workers.ports]
        async with control_plane(model, addresses) as stack:
            yield stack, workers
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
        for plane in workers.planes:
            plane.stop(signal.SIGKILL)


async def test_a_request_that_kills_workers_ends_alone(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (stack, workers):
        made = await cases(stack, COUNT, TOKENS)
        before = stack.held()
        deadly = asked("seeded", 1, TOKENS)
        deadly.sampling.temperature, deadly.sampling.seed = 1.0, DEADLY_SEED
        running = [asyncio.create_task(answer(stack, case.request)) for case in made]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await answer(stack, deadly)
        assert refused.value.code() is grpc.StatusCode.INTERNAL
        assert "ROW_FAULT" in str(refused.value.trailing_metadata())
        assert await asyncio.gather(*running) == [case.right for case in made]
        assert 3 <= workers.end_count <= 6
        await stack.attached()
        assert [held.running + held.waiting for held in stack.held()] == [0, 0]
        assert [held.free_rows for held in stack.held()] == [held.free_rows for held in before]


async def test_sigterm_moves_what_runs_and_ends_the_worker_at_once(tmp_path: Path) -> None:
    number = 1
    async with fleet(tmp_path) as (stack, workers):
        made = await cases(stack, COUNT, TOKENS)
        running = [asyncio.create_task(answer(stack, case.request)) for case in made]
        while not stack.held()[number].running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        leaving = workers.planes[number].process
        leaving.send_signal(signal.SIGTERM)
        assert await asyncio.gather(*running) == [case.right for case in made]
        assert await asyncio.to_thread(leaving.wait, STOP_SECONDS) == 0
        await stack.attached()
        stats = stack.fleet.replicas[number].stats()
        assert stats is not None and stats.moved_out > 0
        again = await asyncio.gather(*(answer(stack, case.request) for case in made[:4]))
        assert again == [case.right for case in made[:4]]


async def test_what_a_stopped_worker_had_is_elsewhere_within_seconds(tmp_path: Path) -> None:
    async with fleet(tmp_path) as (stack, workers):
        made = await cases(stack, 8, TOKENS)
        running = [asyncio.create_task(answer(stack, case.request)) for case in made]
        while not stack.held()[0].running:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        stopped = workers.planes[0].process
        stopped.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert await asyncio.gather(*running) == [case.right for case in made]
        # Three seconds, and what eight short answers take on a machine that does other things.
        assert time.monotonic() - started < 20.0
        assert stack.fleet.replicas[0].lost_seconds > 0
        stopped.send_signal(signal.SIGCONT)
        await stack.attached()
