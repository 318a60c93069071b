"""A driver, a fake worker and clients, all in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from control_plane.core.events import Finish
from control_plane.core.request import (
    Request,
    RequestId,
    SamplingParams,
    StopConditions,
    StopScanner,
)
from control_plane.observability.metrics import Telemetry
from control_plane.shell.driver import Driver, DriverSettings
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.stream import TokenStream
from tests.simulation.fake_worker import FakeWorker
from tests.simulation.virtual_time import VirtualLoop


@dataclass(slots=True, eq=False)
class Answer:
    """What a client saw."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None
    end_count: int = 0


async def until(condition: Callable[[], bool]) -> None:
    """Looks every millisecond, of virtual time where there is one."""
    while True:
        if condition():
            return
        await asyncio.sleep(0.001)


async def read(stream: TokenStream, answer: Answer) -> None:
    """Takes from a stream until its end."""
    while True:
        try:
            tokens, finish = await stream.take()
        except Exception as error:
            answer.error = error
            answer.end_count += 1
            return
        answer.tokens += tokens
        if finish is not None:
            answer.finish = finish
            answer.end_count += 1
            return


def request(
    name: str, prompt: Sequence[int], max_tokens: int, *, arrival: float = 0.0, seed: int = 0,
    stop_token_ids: Sequence[int] = (), priority: int = 0,
) -> Request:  # fmt: skip
    """A request of the fake model."""
    return Request(
        request_id=RequestId(name),
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(),
        seed=seed,
        stop=StopConditions(max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids)),
        arrival=arrival,
        priority=priority,
    )


class Rig:
    """One driver under test. `readiness` lists every change it reported."""

    def __init__(
        self, loop: VirtualLoop, worker: FakeWorker, settings: DriverSettings, seed: int
    ) -> None:
        self.loop = loop
        self.worker = worker
        self.readiness: list[bool] = []
        self.telemetry = Telemetry("0")
        self.driver = Driver(
            worker,
            settings,
            clock=loop.time,
            rng=random.Random(seed),
            telemetry=self.telemetry,
            on_readiness=self.readiness.append,
        )
        self.group = asyncio.TaskGroup()

    async def attached(self) -> None:
        """Waits until the driver is ready."""
        await until(lambda: self.driver.ready)

    def submit(self, asked: Request, scanner: StopScanner | None = None) -> Answer:
        """Submits a request and reads its stream in a task of its own."""
        answer = Answer()
        stream = TokenStream()
        self.driver.submit(asked, stream, scanner)
        self.group.create_task(read(stream, answer))
        return answer

    async def settled(self, *answers: Answer) -> None:
        """Waits until each of them has ended."""
        await until(lambda: all(answer.end_count for answer in answers))


def settings(*, synchronous: bool = False, **changes: float) -> DriverSettings:
    """Settings that audit the core whenever it is idle."""
    return DriverSettings(
        scheduling=SchedulingSettings(async_scheduling=not synchronous),
        check_invariants=True,
        **changes,  # type: ignore[arg-type]
    )


@asynccontextmanager
async def running(
    loop: VirtualLoop,
    worker: FakeWorker,
    chosen: DriverSettings | None = None,
    seed: int = 0,
) -> AsyncIterator[Rig]:
    """A rig whose driver runs for the time of the block, attached at its start."""
    rig = Rig(loop, worker, chosen or settings(), seed)
    async with rig.group:
        task = rig.group.create_task(rig.driver.run())
        await rig.attached()
        try:
            yield rig
        finally:
            task.cancel()
