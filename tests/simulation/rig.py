"""A fleet, fake workers and clients, all in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from control_plane.core.claim import ClaimPolicy
from control_plane.core.events import Finish, Stats
from control_plane.core.request import Request, RequestId, SamplingParams, StopConditions
from control_plane.core.scheduler import Scheduler
from control_plane.observability.metrics import Telemetry
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TextSink, TokenStream
from control_plane.shell.workers import ServingWorker, serving_worker
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
            delta = await stream.take()
        except Exception as error:
            answer.error = error
            answer.end_count += 1
            return
        answer.tokens += delta.tokens.ids
        if delta.finish is not None:
            answer.finish = delta.finish
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


def number_of(fleet: Fleet, request_id: RequestId) -> int:
    """Of the replica where a request that is not over runs, or waits, as the register has it."""
    (sequence_id,) = fleet.register.requests[request_id]
    return fleet.register._sequences[sequence_id].replica.number


class StopAt:
    """A text sink that finds its stop string after so many tokens, and has no text."""

    searches = True

    def __init__(self, count: int) -> None:
        self._left = count

    @property
    def stop_string(self) -> str | None:
        return "stop" if self._left <= 0 else None

    def push(self, token_ids: list[int]) -> int | None:
        self._left -= len(token_ids)
        return len(token_ids) + self._left if self._left <= 0 else None

    def finish(self) -> None:
        """Nothing is held back."""

    def drain(self) -> str:
        return ""


class Rig:
    """One fleet under test. `readiness` lists every change it reported."""

    def __init__(
        self,
        loop: VirtualLoop,
        workers: Sequence[FakeWorker],
        chosen: ReplicaSettings,
        seed: int,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.loop = loop
        self.workers = workers
        self.readiness: list[bool] = []
        for number, worker in enumerate(workers):
            if worker.machine.name == "fake":
                worker.machine.name = f"fake-{number}"
        self.telemetry = Telemetry("0")
        self.fleet = Fleet(
            workers,
            chosen,
            clock=clock or loop.time,
            jitter=random.Random(seed).random,
            metrics=self.telemetry,
            on_readiness=self.readiness.append,
        )
        self.group = asyncio.TaskGroup()

    async def attached(self) -> None:
        """Waits until every replica is."""
        await until(lambda: all(replica.attached for replica in self.fleet.replicas))

    def submit(self, asked: Request, sink: TextSink | None = None) -> Answer:
        """Submits a request and reads its stream in a task of its own."""
        answer = Answer()
        stream = TokenStream(sink)
        self.fleet.submit(asked, stream)
        self.group.create_task(read(stream, answer))
        return answer

    async def settled(self, *answers: Answer) -> None:
        """Waits until each of them has ended."""
        await until(lambda: all(answer.end_count for answer in answers))

    def serving(self) -> list[ServingWorker]:
        """What ListModels tells of each worker."""
        return [serving_worker(replica) for replica in self.fleet.replicas]

    def stats(self, number: int = 0) -> Stats:
        """A replica's counts."""
        stats = self.fleet.replicas[number].stats()
        assert stats is not None
        return stats

    def core(self, number: int = 0) -> Scheduler:
        """A replica's core, for audits."""
        core = self.fleet.replicas[number]._core
        assert core is not None
        return core


def settings(*, synchronous: bool = False, **changes: float) -> ReplicaSettings:
    """Settings that audit the core whenever it is idle; `changes` are ClaimPolicy's."""
    return ReplicaSettings(
        scheduling=SchedulingSettings(async_scheduling=not synchronous),
        claim=ClaimPolicy(**changes),  # type: ignore[arg-type]
        check_invariants=True,
    )


@asynccontextmanager
async def running(
    loop: VirtualLoop,
    worker: FakeWorker | Sequence[FakeWorker],
    chosen: ReplicaSettings | None = None,
    seed: int = 0,
) -> AsyncIterator[Rig]:
    """A rig whose fleet runs for the time of the block, attached at its start."""
    workers = [worker] if isinstance(worker, FakeWorker) else worker
    rig = Rig(loop, workers, chosen or settings(), seed)
    async with rig.group:
        task = rig.group.create_task(rig.fleet.run())
        async with asyncio.timeout(60.0):
            await rig.attached()
        try:
            yield rig
        finally:
            task.cancel()
