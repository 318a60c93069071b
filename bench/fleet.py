"""The control plane's fleet and core in this process, over any worker, with no clients' gRPC.

What it generates costs what scheduling, delivering and the way to the worker cost, and no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence

from control_plane.core.plan import StepPlan, StepResult
from control_plane.core.request import Request, RequestId, SamplingParams, StopConditions
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.turns import Turns
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.ports import Admit, Attachment, Worker
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream


class StepTimes:
    """A Worker that notes what each step of nothing but decodes took on the device, in seconds."""

    def __init__(self, worker: Worker, rows: int) -> None:
        self.seconds: list[float] = []
        self._worker = worker
        self._rows = rows
        self._decoding: list[bool] = []

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        self._decoding.clear()
        return await self._worker.attach(epoch, admit)

    async def send(self, plan: StepPlan) -> None:
        counts = plan.scheduled.token_counts
        self._decoding.append(not plan.added and list(counts) == [1] * self._rows)
        await self._worker.send(plan)

    async def receive(self) -> StepResult:
        result = await self._worker.receive()
        if self._decoding.pop(0):
            assert result.executed_seconds is not None
            self.seconds.append(result.executed_seconds)
        return result

    async def ping(self) -> None:
        await self._worker.ping()

    async def detach(self) -> None:
        await self._worker.detach()


class RunningFleet:
    """A fleet of one replica that runs. Made by `running`."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._submitted = 0
        self._turns = Turns()

    async def generate(self, prompts: Sequence[list[int]], output_tokens: int) -> float:
        """All prompts at once, greedily; the seconds until the last has its last token."""
        started = time.perf_counter()
        await asyncio.gather(*(self._one(prompt, output_tokens) for prompt in prompts))
        return time.perf_counter() - started

    async def _one(self, prompt: list[int], output_tokens: int) -> None:
        self._submitted += 1
        stream = TokenStream(gate=self._turns)
        self._fleet.submit(
            Request(
                request_id=RequestId(str(self._submitted)),
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(temperature=0.0),
                seed=0,
                stop=StopConditions(max_tokens=output_tokens),
                arrival=time.monotonic(),
            ),
            stream,
        )
        count, finish = 0, None
        while finish is None:
            delta = await stream.take()
            count += len(delta.tokens)
            finish = delta.finish
        assert count == output_tokens


@contextlib.asynccontextmanager
async def running(
    worker: Worker, scheduling: SchedulingSettings | None = None
) -> AsyncIterator[RunningFleet]:
    """Claims the worker and drives it until the block is left."""
    ready = asyncio.Event()
    fleet = Fleet(
        [worker],
        ReplicaSettings(scheduling=scheduling or SchedulingSettings()),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("bench"),
        on_readiness=lambda is_ready: ready.set() if is_ready else None,
    )
    task = asyncio.create_task(fleet.run())
    try:
        async with asyncio.timeout(60):
            await ready.wait()
        yield RunningFleet(fleet)
    finally:
        task.cancel()
        await asyncio.wait([task])
