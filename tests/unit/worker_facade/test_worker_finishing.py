"""A worker that was told to end goes on for the controller that holds it, until that lets go."""

from __future__ import annotations

import asyncio
import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.wire import Wire
from tests.support.worker_rig import (
    PATIENCE,
    Device,
    Rig,
    attach_request,
    execute,
    first,
    following,
    refusal,
    serving,
    wanted,
)
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc
from worker_service.lifecycle import LifecycleState
from worker_service.rpc.server import SERVICE_NAME

QUIET = 0.2


def attach_as(controller: str, epoch: int) -> model_runner_pb2.AttachRequest:
    request = attach_request(epoch)
    request.controller_id = controller
    return request


async def released(rig: Rig, quiet: float = QUIET) -> None:
    await asyncio.wait_for(rig.server.released(quiet), PATIENCE)


async def status(rig: Rig, service: str) -> str:
    answer = await health_pb2_grpc.HealthStub(rig.channel).Check(
        health_pb2.HealthCheckRequest(service=service)
    )
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def test_it_goes_on_for_its_controller_and_for_no_other() -> None:
    async with serving() as rig:
        await rig.stub.Attach(attach_as("ours", 1))
        stream = rig.stub.Execute()
        await stream.write(execute(first()))
        answer = await stream.read()
        assert (list(answer.forward.result.tokens), answer.is_leaving) == (wanted(1), False)
        rig.facade.finish()
        await stream.write(execute(following(2)))
        answer = await stream.read()
        assert (list(answer.forward.result.tokens), answer.is_leaving) == (wanted(2)[1:], True)
        other = await refusal(rig.stub.Attach(attach_as("another", 2)))
        assert (other.code, other.reason) == (grpc.StatusCode.UNAVAILABLE, "WORKER_DRAINING")
        assert (await rig.stub.Attach(attach_as("ours", 2))).previous_epoch == 1
        assert await status(rig, "") == await status(rig, SERVICE_NAME) == "NOT_SERVING"
        assert await status(rig, "liveness") == "SERVING"


async def test_nobody_holds_it() -> None:
    async with serving() as rig:
        rig.facade.finish()
        await released(rig, quiet=600.0)
        for controller in ("", "a"):
            refused = await refusal(rig.stub.Attach(attach_as(controller, 1)))
            assert refused.reason == "WORKER_DRAINING"


@pytest.mark.parametrize("how", ["half-closes", "cancels", "vanishes"])
async def test_its_controller_lets_go(how: str) -> None:
    async with (
        serving() as rig,
        Wire(int(rig.address.rpartition(":")[2])) as wire,
        grpc.aio.insecure_channel(f"127.0.0.1:{wire.port}") as channel,
    ):
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        await stub.Attach(attach_as("ours", 1))
        stream = stub.Execute()
        await stream.write(execute(first()))
        await stream.read()
        rig.facade.finish()
        waiting = asyncio.create_task(released(rig, quiet=600.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        match how:
            case "half-closes":
                await stream.done_writing()
            case "cancels":
                stream.cancel()
            case "vanishes":
                wire.reset()
        await asyncio.wait_for(waiting, PATIENCE)


async def test_its_controller_has_nothing_to_run() -> None:
    """An idle control plane keeps its stream, and must not hold up the end of its worker."""
    async with serving() as rig:
        await rig.stub.Attach(attach_as("ours", 1))
        stream = rig.stub.Execute()
        await stream.write(execute(first()))
        await stream.read()
        rig.facade.finish()
        started = time.monotonic()
        await released(rig)
        assert time.monotonic() - started >= QUIET
        rig.facade.drain()
        rig.server.end_streams()
        assert (await refusal(stream.read())).reason == "WORKER_DRAINING"


async def test_a_step_that_takes_long_is_not_quiet() -> None:
    device = Device(1)
    async with serving(device) as rig:
        await rig.stub.Attach(attach_as("ours", 1))
        stream = rig.stub.Execute()
        await stream.write(execute(first()))
        await device.entered()
        rig.facade.finish()
        waiting = asyncio.create_task(released(rig, quiet=0.01))
        await asyncio.sleep(0.2)
        assert not waiting.done()
        device.open()
        await asyncio.wait_for(waiting, PATIENCE)
        assert list((await stream.read()).forward.result.tokens) == wanted(1)


async def test_a_controller_that_was_refused_may_come_back() -> None:
    async with serving() as rig:
        await rig.stub.Attach(attach_as("ours", 1))
        stream = rig.stub.Execute()
        rig.facade.finish()
        await stream.write(execute(following(7)))
        assert (await refusal(stream.read())).reason == "STEP_GAP"
        waiting = asyncio.create_task(released(rig, quiet=600.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await rig.stub.Attach(attach_as("ours", 2))
        again = rig.stub.Execute()
        await again.write(execute(first(epoch=2)))
        assert list((await again.read()).forward.result.tokens) == wanted(1)
        again.cancel()
        await asyncio.wait_for(waiting, PATIENCE)


async def test_it_was_still_loading() -> None:
    async with serving(load=False) as rig:
        assert await status(rig, "liveness") == "SERVING"
        assert await status(rig, "readiness") == "NOT_SERVING"
        rig.facade.finish()
        await released(rig, quiet=600.0)
        assert (await refusal(rig.stub.Attach(attach_as("a", 1)))).reason == "WORKER_DRAINING"
        await rig.facade.load()
        assert rig.facade.lifecycle.state is LifecycleState.FINISHING
