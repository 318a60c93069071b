"""What the server itself does: addresses, health, reflection, stopping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from control_plane.rpc.server import INFERENCE_SERVICE_NAME, ControlServer, inference_service
from twinplane.grpc.health import SettableReadiness
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.grpc.listen import CannotListen
from twinplane.grpc.server import Service
from twinplane.inference.v1 import inference_pb2_grpc
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


@dataclass(frozen=True)
class Rig:
    """A server whose service implements nothing, and its readiness."""

    server: ControlServer
    readiness: SettableReadiness


def interceptor() -> StatusInterceptor:
    return StatusInterceptor(lambda error: None, lambda *call: None, lambda: "error")


def made() -> Rig:
    readiness = SettableReadiness()
    service = inference_service(inference_pb2_grpc.InferenceServiceServicer())
    return Rig(ControlServer([service], readiness, interceptor()), readiness)


@asynccontextmanager
async def started(uds: Path | None = None) -> AsyncIterator[tuple[Rig, str]]:
    rig = made()
    address = await rig.server.start("127.0.0.1", 0, uds)
    try:
        yield rig, address
    finally:
        await rig.server.stop(0.0)


@asynccontextmanager
async def health_stub(address: str) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield health_pb2_grpc.HealthStub(channel)


def asks(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


async def test_health_follows_readiness() -> None:
    async with started() as (rig, address), health_stub(address) as stub:
        for ready, status in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
            rig.readiness.set_serving(ready)
            for service in ("", INFERENCE_SERVICE_NAME):
                assert (await stub.Check(asks(service))).status == status
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Check(asks("another.Service"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watch_sees_each_change_and_ends_with_the_server() -> None:
    async with started() as (rig, address), health_stub(address) as stub:
        watch = stub.Watch(asks(""))
        unknown = stub.Watch(asks("another.Service"))
        assert (await watch.read()).status == NOT_SERVING
        assert (await unknown.read()).status == SERVICE_UNKNOWN
        rig.readiness.set_serving(True)
        assert (await watch.read()).status == SERVING
        # Far longer than the test may take: an open watch must not hold the server up.
        await asyncio.wait_for(rig.server.stop(600.0), 10.0)
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF


async def test_reflection_lists_what_is_served() -> None:
    async with started() as (_, address), grpc.aio.insecure_channel(address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        response = await call.read()
        names = {service.name for service in response.list_services_response.service}
        assert names >= {INFERENCE_SERVICE_NAME, "grpc.health.v1.Health"}
        await call.done_writing()


async def test_another_service_is_one_more_in_the_list() -> None:
    add_to_server = model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server
    other = Service(
        "other.v1.Name", add_to_server, model_runner_pb2_grpc.ModelRunnerServiceServicer()
    )
    first = inference_service(inference_pb2_grpc.InferenceServiceServicer())
    server = ControlServer([first, other], SettableReadiness(), interceptor())
    address = await server.start("127.0.0.1", 0)
    try:
        async with health_stub(address) as stub:
            for service in (INFERENCE_SERVICE_NAME, "other.v1.Name"):
                assert (await stub.Check(asks(service))).status == NOT_SERVING
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError, match="not implemented") as error:
                await model_runner_pb2_grpc.ModelRunnerServiceStub(channel).GetWorkerInfo(
                    model_runner_pb2.GetWorkerInfoRequest()
                )
            assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    finally:
        await server.stop(0.0)


async def test_a_taken_port_is_said_at_once() -> None:
    async with started() as (_, address):
        port = int(address.rpartition(":")[2])
        second = made().server
        with pytest.raises(CannotListen, match=str(port)):
            await second.start("127.0.0.1", port, None)
        await second.stop(0.0)


async def test_a_unix_socket_is_private_and_goes_with_the_server(tmp_path: Path) -> None:
    path = tmp_path / "control.sock"
    async with started(path) as (rig, address), health_stub(address) as stub:
        assert path.stat().st_mode & 0o777 == 0o600
        rig.readiness.set_serving(True)
        assert (await stub.Check(asks(""))).status == SERVING
    assert not path.exists()
