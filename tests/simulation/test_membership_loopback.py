"""Three simulated workers behind real gRPC: a file is edited under load, and nobody notices."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from control_plane.core.claim import ClaimPolicy
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.workers import place_at, worker_at
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.membership import Membership
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream
from control_plane.shell.worker_lists import ListedInDns, ListedInFile, WorkerList
from tests.simulation.rig import Answer, read, request
from worker_service.domain.capability import Limits
from worker_service.facade import WorkerFacade
from worker_service.rpc.server import WorkerServer
from worker_service.simulated.runner import SimulatedLatency, SimulatedModel, SimulatedRunner

LIMITS = Limits(
    max_sequence_count=4,
    max_step_token_count=64,
    max_sequence_token_count=256,
    max_prompt_token_count=256,
)
COUNT = 60
PROMPTS = {f"r{n}": [(7 * n + k) % 500 for k in range(3 + 2 * n)] for n in range(12)}


@asynccontextmanager
async def worker(name: str, step: float = 0.003) -> AsyncIterator[tuple[str, WorkerFacade]]:
    """A worker at a free port, and its address."""
    model = SimulatedModel("simulated", 500, LIMITS, 200, block_size=8)
    facade = WorkerFacade(
        lambda: SimulatedRunner(model, SimulatedLatency(step, 0.0, 0.0, 0.0)),
        worker_id=name,
        incarnation_id=name,
    )
    await facade.load()
    server = WorkerServer(facade)
    try:
        yield await server.start("127.0.0.1", 0, None), facade
    finally:
        facade.drain()
        server.end_streams()
        await server.stop(0.0)
        await facade.close()


@asynccontextmanager
async def following(*lists: WorkerList, named: tuple[str, ...] = ()) -> AsyncIterator[Fleet]:
    """A fleet that looks at its lists all the time."""
    fleet = Fleet(
        [],
        ReplicaSettings(SchedulingSettings(), ClaimPolicy(), check_invariants=True),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("test"),
        on_readiness=lambda ready: None,
    )
    members = Membership(
        fleet,
        lambda address: worker_at(address, controller_id="test"),
        named,
        lists,
        refresh_seconds=0.01,
        ask=lambda address: place_at(address, controller_id="test"),
    )
    tasks = [asyncio.create_task(fleet.run()), asyncio.create_task(members.run())]
    try:
        async with asyncio.timeout(120):
            yield fleet
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.002)


def attached(fleet: Fleet) -> set[str]:
    return {replica.life.address for replica in fleet.replicas if replica.attached}


async def generate(fleet: Fleet) -> tuple[asyncio.TaskGroup, dict[str, Answer]]:
    group, answers = asyncio.TaskGroup(), dict[str, Answer]()
    await group.__aenter__()
    for name, prompt in PROMPTS.items():
        stream, answers[name] = TokenStream(), Answer()
        fleet.submit(request(name, prompt, COUNT, arrival=time.monotonic()), stream)
        group.create_task(read(stream, answers[name]))
    return group, answers


async def finished(group: asyncio.TaskGroup, answers: dict[str, Answer]) -> dict[str, list[int]]:
    await group.__aexit__(None, None, None)
    assert all(answer.error is None for answer in answers.values())
    return {name: answer.tokens for name, answer in answers.items()}


def balances(fleet: Fleet) -> None:
    for replica in fleet.replicas:
        if (stats := replica.stats()) is not None:
            assert (stats.running, stats.waiting, stats.kv_active_tokens) == (0, 0, 0)


async def test_a_file_is_edited_under_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "workers"
    async with AsyncExitStack() as stack:
        made = [await stack.enter_async_context(worker(f"w{n}")) for n in range(4)]
        (a, _), (b, first), (c, _), (d, last) = made
        path.write_text(f"{a}\n")
        async with following(ListedInFile(path)) as fleet:
            await until(lambda: attached(fleet) == {a})
            right = await finished(*await generate(fleet))
            path.write_text(f"{a}\n{b} # the second\n{c}\n")
            await until(lambda: attached(fleet) == {a, b, c})
            group, answers = await generate(fleet)
            await until(lambda: all(len(answer.tokens) >= 3 for answer in answers.values()))
            leaving = next(r for r in fleet.replicas if r.life.address == b)
            path.write_text(f"{a}\n{b}:x\n")  # a slip: nothing changes
            await until(lambda: "the list of workers can't be used" in caplog.text)
            assert attached(fleet) == {a, b, c}
            path.write_text(f"{a}\n{c}\n{d}\n")
            await until(lambda: attached(fleet) == {a, c, d} and leaving not in fleet.replicas)
            assert await finished(group, answers) == right
            balances(fleet)
            assert (first.worker_info().epoch, last.worker_info().epoch) == (1, 1)


async def test_a_name_that_flaps_under_load() -> None:
    """By a resolver of its own: every address of 127/8 is this machine."""
    async with AsyncExitStack() as stack:
        address, _ = await stack.enter_async_context(worker("w"))
        port = address.rpartition(":")[2]
        found = ["127.0.0.1"]
        fails = False
        look_count = 0

        def resolver(host: str, port: int) -> list[str]:
            nonlocal look_count
            look_count += 1
            if fails:
                raise OSError("the name server does not answer")
            return list(found)

        async with following(ListedInDns(f"workers:{port}", resolver)) as fleet:
            await until(lambda: attached(fleet) == {f"127.0.0.1:{port}"})
            right = await finished(*await generate(fleet))
            group, answers = await generate(fleet)
            await until(lambda: all(answer.tokens for answer in list(answers.values())[:4]))
            fails, before = True, look_count
            await until(lambda: look_count >= before + 2)
            fails, found[:], before = False, [], look_count
            await until(lambda: look_count >= before + 2)
            assert attached(fleet) == {f"127.0.0.1:{port}"}
            found[:] = ["127.0.0.9"]  # nobody listens there
            await until(lambda: any(r.state.value == "draining" for r in fleet.replicas))
            found[:] = ["127.0.0.1"]
            assert await finished(group, answers) == right
            await until(lambda: attached(fleet) == {f"127.0.0.1:{port}"})
            await until(lambda: len(fleet.replicas) == 1)
            balances(fleet)


async def test_two_names_of_one_worker_are_one() -> None:
    """localhost and 127.0.0.1: the second address claims nothing."""
    async with AsyncExitStack() as stack:
        address, facade = await stack.enter_async_context(worker("w"))
        port = address.rpartition(":")[2]
        async with following(
            ListedInDns(f"localhost:{port}"), named=(f"localhost:{port}", f"127.0.0.2:{port}")
        ) as fleet:
            await until(lambda: len(attached(fleet)) == 1)
            right = await finished(*await generate(fleet))
            await until(
                lambda: any("is here already" in replica.life.reason for replica in fleet.replicas)
            )
            assert await finished(*await generate(fleet)) == right
            assert facade.worker_info().epoch == 1
            balances(fleet)
