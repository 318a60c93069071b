"""Health: what watchers are told, how they end, and the supervisor's way to wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.planes import free_port
from twinplane.cli.health import Health
from twinplane.grpc.health import HealthServicer, ServingState, SettableReadiness
from twinplane.grpc.listen import listen
from twinplane.grpc.options import SERVER_OPTIONS
from worker_service.lifecycle import Lifecycle, LifecycleState
from worker_service.rpc.health import LifecycleReadiness

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
PATIENCE = 10.0


@asynccontextmanager
async def serving(readiness: SettableReadiness, port: int = 0) -> AsyncIterator[str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(readiness, ["a.Service"]), server)
    address = listen(server, "127.0.0.1", port, None)
    await server.start()
    try:
        yield address
    finally:
        readiness.set(ServingState.ENDING)
        await server.stop(0.0)


async def is_pending(task: asyncio.Task[None]) -> bool:
    """Whether it still waits after everything that is ready has run."""
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


async def test_a_watch_that_comes_late_is_told_and_ends() -> None:
    readiness = SettableReadiness()
    async with serving(readiness) as address, grpc.aio.insecure_channel(address) as channel:
        readiness.set(ServingState.SERVING)
        readiness.set(ServingState.ENDING)
        readiness.set(ServingState.SERVING)
        assert readiness.state is ServingState.ENDING, "nothing follows the end"
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert [answer.status async for answer in watch] == [NOT_SERVING]


async def test_a_state_that_is_said_again_is_no_change() -> None:
    readiness = SettableReadiness()
    async with serving(readiness) as address, grpc.aio.insecure_channel(address) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service="a.Service")
        )
        assert (await watch.read()).status == NOT_SERVING
        readiness.set(ServingState.NOT_SERVING)
        readiness.set(ServingState.SERVING)
        assert (await watch.read()).status == SERVING
        readiness.set(ServingState.ENDING)
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


@pytest.mark.parametrize("state", ServingState)
@pytest.mark.parametrize("service", ["", "readiness", "a.Service", "liveness"])
async def test_each_name_in_each_state(state: ServingState, service: str) -> None:
    """A process that loads, waits or ends is alive all the same."""
    readiness = SettableReadiness()
    async with serving(readiness) as address, grpc.aio.insecure_channel(address) as channel:
        readiness.set(state)
        stub = health_pb2_grpc.HealthStub(channel)
        right = SERVING if service == "liveness" or state is ServingState.SERVING else NOT_SERVING
        asked = health_pb2.HealthCheckRequest(service=service)
        assert (await stub.Check(asked)).status == right
        watch = aiter(stub.Watch(asked))
        assert (await anext(watch)).status == right
        readiness.set(ServingState.ENDING)
        changes = [NOT_SERVING] if right == SERVING and service != "liveness" else []
        assert [answer.status async for answer in watch] == changes


async def test_a_failed_worker_looks_no_different_from_outside() -> None:
    lifecycle = Lifecycle()
    readiness = LifecycleReadiness(lifecycle)
    assert readiness.state is ServingState.NOT_SERVING
    lifecycle.move(LifecycleState.ACTIVE)
    changed = asyncio.create_task(readiness.changed_from(ServingState.SERVING))
    lifecycle.move(LifecycleState.FAILED)
    assert await is_pending(changed)
    assert readiness.state is ServingState.SERVING
    lifecycle.move(LifecycleState.DRAINING)
    await asyncio.wait_for(changed, PATIENCE)
    assert readiness.state is ServingState.ENDING


async def test_the_supervisor_waits_for_a_server_that_is_not_there_yet() -> None:
    port = free_port()
    waiting = asyncio.create_task(Health(f"127.0.0.1:{port}").serving())
    await asyncio.sleep(0.3)
    readiness = SettableReadiness()
    async with serving(readiness, port):
        await asyncio.sleep(0.3)
        assert await is_pending(waiting)
        readiness.set(ServingState.SERVING)
        await asyncio.wait_for(waiting, PATIENCE)
