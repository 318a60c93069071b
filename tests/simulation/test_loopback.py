"""Fleet, contract and simulated worker together: in process, and over real loopback gRPC."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

from bench.inprocess import InProcessWorker
from control_plane.core.claim import ClaimPolicy
from control_plane.core.plan import Message as PlanMessage
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.ports import Worker, WorkerLost, WorkerRefused, WorkerUnusable
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream
from tests.simulation.rig import Answer, read, request, until
from tests.support.provoked_runner import ProvokedRunner
from tests.support.quick import spread
from tests.support.wire import Wire
from worker_service.domain.capability import Limits
from worker_service.domain.plan import RowFault, RowFaultKind, StepPlan
from worker_service.facade import WorkerFacade
from worker_service.rpc.server import WorkerServer
from worker_service.simulated.runner import SimulatedLatency, SimulatedModel, SimulatedRunner

LIMITS = Limits(
    max_sequence_count=4,
    max_step_token_count=32,
    max_sequence_token_count=128,
    max_prompt_token_count=128,
)
INSTANT = SimulatedLatency(0.0, 0.0, 0.0, 0.0)
PROMPTS = {f"r{n}": [(7 * n + k) % 500 for k in range(3 + 9 * n)] for n in range(8)}
COUNT = 24


@asynccontextmanager
async def facade(
    block_count: int = 200,
    latency: SimulatedLatency = INSTANT,
    provoke: Callable[[StepPlan], Sequence[RowFault]] = lambda plan: (),
) -> AsyncIterator[WorkerFacade]:
    model = SimulatedModel("simulated", 500, LIMITS, block_count, block_size=8)
    made = WorkerFacade(
        lambda: ProvokedRunner(SimulatedRunner(model, latency), provoke),
        worker_id="w",
        incarnation_id="i",
    )
    await made.load()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def server(
    worker: WorkerFacade, uds: Path | None = None, port: int = 0
) -> AsyncIterator[str]:
    made = WorkerServer(worker)
    address = await made.start("127.0.0.1", port, uds)
    try:
        yield address
    finally:
        worker.drain()
        made.end_streams()
        await made.stop(0.0)


@asynccontextmanager
async def driven(
    worker: Worker, scheduling: SchedulingSettings, claim: ClaimPolicy | None = None
) -> AsyncIterator[Fleet]:
    ready = asyncio.Event()
    fleet = Fleet(
        [worker],
        ReplicaSettings(scheduling, claim or ClaimPolicy(), check_invariants=True),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("test"),
        on_readiness=lambda is_ready: ready.set() if is_ready else ready.clear(),
    )
    task = asyncio.create_task(fleet.run())
    try:
        await ready.wait()
        yield fleet
    finally:
        task.cancel()
        await asyncio.wait([task])


async def generate(fleet: Fleet, names: list[str]) -> dict[str, list[int]]:
    answers: dict[str, Answer] = {}
    async with asyncio.TaskGroup() as group:
        for name in names:
            stream, answers[name] = TokenStream(), Answer()
            fleet.submit(request(name, PROMPTS[name], COUNT, arrival=time.monotonic()), stream)
            group.create_task(read(stream, answers[name]))
    assert all(answer.error is None for answer in answers.values())
    return {name: answer.tokens for name, answer in answers.items()}


async def alone() -> dict[str, list[int]]:
    """Each request by itself, whole, uncached, one step at a time: what is right."""
    tokens: dict[str, list[int]] = {}
    plain = SchedulingSettings(async_scheduling=False, enable_prefix_caching=False)
    async with facade() as worker, driven(InProcessWorker(worker), plain) as fleet:
        for name in PROMPTS:
            tokens |= await generate(fleet, [name])
    return tokens


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("block_count", spread([20, 200], 1))
@pytest.mark.parametrize("budget", spread([7, None], 1))
async def test_in_process_tokens_do_not_depend_on_the_schedule(
    async_scheduling: bool, block_count: int, budget: int | None
) -> None:
    scheduling = SchedulingSettings(async_scheduling=async_scheduling, max_step_token_count=budget)
    async with (
        facade(block_count) as worker,
        driven(InProcessWorker(worker), scheduling) as fleet,
    ):
        for _ in range(2):  # cold, then with the prefix cache warm
            assert await generate(fleet, list(PROMPTS)) == await alone()


class SteppedWorker(InProcessWorker):
    """Tells the device thread which plan was the last to be sent."""

    def __init__(self, worker: WorkerFacade) -> None:
        super().__init__(worker)
        self._last_sent = 0
        self._sent = threading.Condition()

    async def send(self, message: PlanMessage) -> None:
        await super().send(message)
        with self._sent:
            self._last_sent = message.step_id
            self._sent.notify_all()

    def wait_sent(self, step_id: int) -> None:
        with self._sent:
            assert self._sent.wait_for(lambda: self._last_sent >= step_id, timeout=60)


async def test_a_faulted_row_ends_its_request_and_costs_nobody_else_a_step() -> None:
    """The plan behind the fault already names the faulted step as the row's source."""
    expected = await alone()
    faulted: list[int] = []
    behind: list[bool] = []
    steppers: list[SteppedWorker] = []

    def provoke(plan: StepPlan) -> list[RowFault]:
        """Once, the first of the rows of which two decode."""
        decoding = plan.scheduled.rows[plan.scheduled.source_step_distances > 0]
        if faulted:
            behind.append(faulted[0] in decoding)
            return []
        if decoding.size < 2:
            return []
        faulted.append(int(decoding[0]))
        steppers[0].wait_sent(plan.step_id + 1)
        return [RowFault(faulted[0], RowFaultKind.INVALID_LOGITS, "NaN")]

    answers: dict[str, Answer] = {}
    names = list(PROMPTS)
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(facade(provoke=provoke))
        steppers.append(SteppedWorker(worker))
        fleet = await stack.enter_async_context(driven(steppers[0], SchedulingSettings()))
        group = await stack.enter_async_context(asyncio.TaskGroup())
        for name in names:
            stream, answers[name] = TokenStream(), Answer()
            fleet.submit(request(name, PROMPTS[name], COUNT, arrival=time.monotonic()), stream)
            group.create_task(read(stream, answers[name]))
        await until(lambda: all(answer.finish or answer.error for answer in answers.values()))
        assert behind[0], "the next plan was made after the fault was known"
        assert worker.worker_info().epoch == 1, "the fault cost a claim"
    ends = [answers[name].finish for name in names]
    reasons = [finish.reason for finish in ends if finish is not None]
    assert sorted(r.value for r in reasons) == ["fault"] + ["length"] * (len(names) - 1)
    for name, finish in zip(names, ends, strict=True):
        tokens = answers[name].tokens
        assert tokens == expected[name][: len(tokens)]
        assert finish is not None and (len(tokens) == COUNT) == (finish.reason.value == "length")


@pytest.mark.parametrize("transport", ["tcp", "unix"])
async def test_over_grpc(transport: str, tmp_path: Path) -> None:
    uds = tmp_path / "worker.sock" if transport == "unix" else None
    async with (
        facade() as worker,
        server(worker, uds) as address,
        driven(GrpcWorker(address, controller_id="test"), SchedulingSettings()) as fleet,
    ):
        assert await generate(fleet, list(PROMPTS)) == await alone()
        stats = fleet.replicas[0].stats()
        assert stats is not None and stats.submitted == len(PROMPTS)


async def test_a_worker_that_dies_and_returns_continues_token_for_token(tmp_path: Path) -> None:
    expected = await alone()
    uds = tmp_path / "worker.sock"
    worker = GrpcWorker(f"unix:{uds}", controller_id="test", attach_timeout=2.0)
    async with AsyncExitStack() as stack:
        async with facade(latency=SimulatedLatency(step=0.004)) as first, server(first, uds):
            fleet = await stack.enter_async_context(driven(worker, SchedulingSettings()))
            task = asyncio.create_task(generate(fleet, list(PROMPTS)))
            await _until(lambda: _generated(fleet) >= 20)
        assert not task.done()
        async with facade() as second, server(second, uds):
            assert await task == expected
            assert fleet.ready


async def test_a_reset_connection_keeps_the_kv() -> None:
    """The worker lives on: what it has answered is not computed again, and no token changes."""
    expected = await alone()
    async with (
        facade(latency=SimulatedLatency(step=0.004)) as worker,
        server(worker) as address,
        Wire(int(address.rpartition(":")[2])) as wire,
    ):
        port = GrpcWorker(f"127.0.0.1:{wire.port}", controller_id="test")
        async with driven(port, SchedulingSettings()) as fleet:
            task = asyncio.create_task(generate(fleet, list(PROMPTS)))
            await _until(lambda: _generated(fleet) >= 40)
            wire.reset()
            assert await task == expected
            assert worker.worker_info().epoch == 2
            stats = fleet.replicas[0].stats()
        assert stats is not None
        in_flight = 2
        last_blocks = LIMITS.max_sequence_count * (8 - 1 + in_flight)
        prompt_chunks = in_flight * LIMITS.max_step_token_count
        assert stats.recomputed_tokens <= last_blocks + prompt_chunks


async def test_two_claims_the_older_is_fenced() -> None:
    async with facade() as worker, server(worker) as address:
        first = GrpcWorker(address, controller_id="first")
        second = GrpcWorker(address, controller_id="second")
        claimed = await first.attach()
        later = await second.attach()
        assert later.info.epoch == claimed.info.epoch + 1
        assert later.info.incarnation_id == claimed.info.incarnation_id
        assert later.previous_epoch == claimed.info.epoch
        with pytest.raises(WorkerRefused) as refused:
            await first.attach(epoch=later.info.epoch)
        assert refused.value.reason == "STALE_EPOCH"
        await first.detach()
        await second.detach()


async def test_nobody_listens() -> None:
    worker = GrpcWorker("127.0.0.1:1", controller_id="test", attach_timeout=2.0)
    with pytest.raises(WorkerLost):
        await worker.attach()
    await worker.detach()
    with pytest.raises(WorkerLost):
        await worker.receive()


async def test_something_else_listens() -> None:
    """A gRPC server without the service: said, not crashed."""
    other = grpc.aio.server()
    port = other.add_insecure_port("127.0.0.1:0")
    await other.start()
    worker = GrpcWorker(f"127.0.0.1:{port}", controller_id="test")
    try:
        with pytest.raises(WorkerUnusable, match=r"another service, not a worker .*UNIMPLEMENTED"):
            await worker.attach()
    finally:
        await worker.detach()
        await other.stop(0.0)


async def _until(condition: Callable[[], bool]) -> None:
    while True:
        if condition():
            return
        await asyncio.sleep(0.002)


def _generated(fleet: Fleet) -> int:
    stats = fleet.replicas[0].stats()
    return 0 if stats is None else stats.generated_tokens
