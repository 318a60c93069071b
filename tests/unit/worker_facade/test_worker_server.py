"""The worker's server: life cycle, health, reflection, addresses, the composition root."""

from __future__ import annotations

import asyncio
import logging
import stat
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.support.provoked_runner import ProvokedRunner
from tests.support.worker_rig import (
    MODEL,
    NO_LATENCY,
    PATIENCE,
    Device,
    attach_request,
    execute,
    first,
    following,
    refusal,
    serving,
    simulated_runner,
    until,
    wanted,
)
from twinplane.grpc.listen import CannotListen
from twinplane.settings.worker import WorkerConfig
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc
from worker_service.app import serve
from worker_service.facade import WorkerFacade
from worker_service.lifecycle import LifecycleState
from worker_service.rpc import convert
from worker_service.rpc.server import SERVICE_NAME, WorkerServer
from worker_service.simulated.runner import SimulatedRunner
from worker_service.startup import StartupError

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


async def health(channel: grpc.aio.Channel, service: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


class GatedBuild:
    """Builds a runner once it is let."""

    def __init__(self, outcome: SimulatedRunner | Exception) -> None:
        self._outcome = outcome
        self.entered = threading.Event()
        self.opened = threading.Event()

    def __call__(self) -> SimulatedRunner:
        self.entered.set()
        assert self.opened.wait(PATIENCE)
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome


class UnresettableRunner(SimulatedRunner):
    """Its first reset succeeds."""

    resets = 0

    def reset(self) -> None:
        self.resets += 1
        if self.resets > 1:
            raise MemoryError("no reset")
        super().reset()


async def test_health_follows_the_life_of_the_worker():
    build = GatedBuild(simulated_runner())
    async with serving(build=build, load=False) as rig:
        stub = health_pb2_grpc.HealthStub(rig.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE_NAME))
        assert (await watch.read()).status == NOT_SERVING
        loading = asyncio.ensure_future(rig.facade.load())
        for service in ("", SERVICE_NAME):
            assert await health(rig.channel, service) == NOT_SERVING
        build.opened.set()
        await loading
        assert (await watch.read()).status == SERVING
        for service in ("", SERVICE_NAME):
            assert await health(rig.channel, service) == SERVING
        rig.facade.drain()
        assert (await watch.read()).status == NOT_SERVING
        assert await watch.read() is grpc.aio.EOF, "a drained worker ends its watches"
        assert await health(rig.channel) == NOT_SERVING


async def test_health_of_a_service_that_is_not_here():
    async with serving() as rig:
        stub = health_pb2_grpc.HealthStub(rig.channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="nobody"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_a_loading_worker_says_when_to_try_again():
    build = GatedBuild(simulated_runner())
    async with serving(build=build, load=False) as rig:
        loading = asyncio.ensure_future(rig.facade.load())
        stub = rig.stub
        call = stub.Execute()
        calls = [
            stub.Attach(attach_request(1)),
            stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest()),
            stub.GetMemoryPool(model_runner_pb2.GetMemoryPoolRequest()),
            stub.Forward(first()),
            stub.Sample(model_runner_pb2.SampleRequest(epoch=1, step_id=1)),
            call.read(),
        ]
        for each in calls:
            refused = await refusal(each)
            assert (refused.code, refused.reason) == (UNAVAILABLE, "WORKER_LOADING")
            assert refused.retry_after == 1.0
        build.opened.set()
        await loading
        await rig.attach()


async def test_a_failed_worker_serves_and_a_broken_one_does_not():
    device = Device(failing=[1])
    async with serving(
        build=lambda: ProvokedRunner(UnresettableRunner(MODEL, NO_LATENCY), device)
    ) as rig:
        await rig.attach(1)
        assert (await refusal(rig.stub.Forward(first()))).code is grpc.StatusCode.INTERNAL
        assert rig.facade.lifecycle.state is LifecycleState.FAILED
        assert await health(rig.channel) == SERVING
        refused = await refusal(rig.stub.Attach(attach_request(2)))
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "RUNNER_FAILED")
        assert rig.facade.lifecycle.state is LifecycleState.BROKEN
        assert await health(rig.channel) == NOT_SERVING
        assert (await refusal(rig.stub.Attach(attach_request(3)))).reason == "RUNNER_FAILED"


class Buggy(SimulatedRunner):
    """Raises what no runner should, from methods that execute no step."""

    def capability(self):
        if self.buggy:
            raise KeyError("a secret")
        return super().capability()

    def memory_pool(self):
        raise KeyError("a secret")

    buggy = False


async def test_a_bug_of_ours_tells_the_controller_an_id_and_the_log_where(caplog):
    runner = Buggy(MODEL, NO_LATENCY)
    async with serving(build=lambda: runner) as rig:
        runner.buggy = True
        for call in (
            lambda: rig.stub.GetMemoryPool(model_runner_pb2.GetMemoryPoolRequest()),
            lambda: rig.stub.Execute().read(),
        ):
            refused = await refusal(call())
            assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
            assert refused.message == "internal error"
        runner.buggy = False
        await rig.attach()
    records = [record for record in caplog.records if record.levelname == "ERROR"]
    assert [record.fields["method"].rpartition("/")[2] for record in records] == [
        "GetMemoryPool",
        "Execute",
    ]
    for record in records:
        assert record.fields["error_id"]
        assert "test_worker_server.py" in record.fields["where"]
        assert "secret" not in f"{vars(record)}"


async def test_draining_finishes_what_is_queued_and_ends_the_streams():
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach()
        stream = rig.stub.Execute()
        await stream.write(execute(first()))
        await device.entered()
        queued = await rig.facade.submit(convert.forward_from_pb(following(2)))
        rig.facade.drain()
        rig.server.end_streams()
        refused = await refusal(rig.stub.Forward(following(3)))
        assert (refused.code, refused.reason) == (UNAVAILABLE, "WORKER_DRAINING")
        assert refused.retry_after == 1.0
        assert (await refusal(rig.stub.Attach(attach_request(2)))).reason == "WORKER_DRAINING"
        device.open()
        assert (await queued).tokens.tolist() == wanted(2)[1:]
        assert list((await stream.read()).forward.result.tokens) == wanted(1)
        ended = await refusal(stream.read())
        assert (ended.code, ended.reason) == (UNAVAILABLE, "WORKER_DRAINING")


async def test_reflection_lists_and_describes_the_services():
    async with serving() as rig:
        stub = reflection_pb2_grpc.ServerReflectionStub(rig.channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE_NAME),
        ]
        listed, described = [r async for r in stub.ServerReflectionInfo(iter(requests))]
        names = {service.name for service in listed.list_services_response.service}
        assert names == {
            SERVICE_NAME,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        assert described.file_descriptor_response.file_descriptor_proto


async def test_a_message_of_ten_megabytes_is_read():
    async with serving() as rig:
        await rig.attach()
        request = first()
        request.plan.added[0].token_ids[:] = [2**31 - 1] * 2_000_000
        refused = await refusal(rig.stub.Forward(request))
        assert refused.field == "plan.added[0].token_ids"


async def other_server() -> tuple[WorkerServer, WorkerFacade]:
    facade = WorkerFacade(simulated_runner, worker_id="other", incarnation_id="life-1")
    return WorkerServer(facade), facade


async def test_a_taken_port_is_refused():
    async with serving() as rig:
        server, facade = await other_server()
        port = int(rig.address.rpartition(":")[2])
        with pytest.raises(CannotListen, match=f"127.0.0.1:{port}"):
            await server.start("127.0.0.1", port)
        await facade.close()
        await rig.attach()


async def test_a_unix_socket_is_its_owners_alone_and_goes_with_the_server(tmp_path):
    path = tmp_path / "worker.sock"
    server, facade = await other_server()
    address = await server.start("unused", 0, path)
    try:
        await facade.load()
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with grpc.aio.insecure_channel(address) as channel:
            stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
            assert (await stub.Attach(attach_request(1))).worker_info.worker_id == "other"
    finally:
        await facade.close()
        await server.stop(1.0)
    assert not path.exists()


CONFIG = WorkerConfig(port=0, worker_id="w", simulate=True, drain_seconds=5.0)


async def test_the_application_serves_until_it_is_stopped(caplog):
    caplog.set_level(logging.INFO)
    stop = asyncio.Event()
    running = asyncio.create_task(serve(CONFIG, stop, simulated_runner))
    await until(lambda: any(record.message == "ready" for record in caplog.records))
    (listening,) = [record for record in caplog.records if record.message == "listening"]
    async with grpc.aio.insecure_channel(listening.fields["address"]) as channel:
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        await stub.Attach(attach_request(1))
        stream = stub.Execute()
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        await stream.write(execute(first()))
        await stream.read()
        assert (await watch.read()).status == SERVING
        stop.set()
        assert (await watch.read()).status == NOT_SERVING
        assert (await refusal(stream.read())).reason == "WORKER_DRAINING"
        assert await asyncio.wait_for(running, PATIENCE) == ""


async def test_the_application_stops_while_it_loads():
    stop = asyncio.Event()
    build = GatedBuild(simulated_runner())
    running = asyncio.create_task(serve(CONFIG, stop, build))
    await until(build.entered.is_set)
    stop.set()
    assert await asyncio.wait_for(running, PATIENCE) == ""
    build.opened.set()


@pytest.mark.parametrize("error", [StartupError("no torch here"), ZeroDivisionError("a bug")])
async def test_the_application_ends_with_an_error_when_it_cannot_load(error, caplog):
    build = GatedBuild(error)
    build.opened.set()
    failure = await asyncio.wait_for(serve(CONFIG, asyncio.Event(), build), PATIENCE)
    assert failure.startswith("could not load: ")
    assert failure.endswith(str(error))
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert str(error) in caplog.text + str(getattr(record, "fields", ""))


async def test_the_application_ends_with_an_error_when_the_worker_breaks(caplog):
    caplog.set_level(logging.INFO)
    device = Device(failing=[1])
    build = GatedBuild(ProvokedRunner(UnresettableRunner(MODEL, NO_LATENCY), device))
    build.opened.set()
    running = asyncio.create_task(serve(CONFIG, asyncio.Event(), build))
    await until(lambda: any(record.message == "ready" for record in caplog.records))
    (listening,) = [record for record in caplog.records if record.message == "listening"]
    async with grpc.aio.insecure_channel(listening.fields["address"]) as channel:
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        await stub.Attach(attach_request(1))
        assert (await refusal(stub.Attach(attach_request(2)))).reason == "RUNNER_FAILED"
        assert (await asyncio.wait_for(running, PATIENCE)).startswith("broke: ")


class AcceleratorError(RuntimeError):
    """As torch names what a GPU's driver says."""


LOST = (
    AcceleratorError("an illegal memory access was encountered\nCompile with …"),
    RuntimeError("CUDA error: the GPU has fallen off the bus. For debugging …"),
    RuntimeError("HIP error: no device"),
    RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
)


@pytest.mark.parametrize("error", LOST, ids=lambda error: str(error)[:10])
async def test_the_application_ends_when_its_device_is_gone(error, caplog):
    """No later step could run in this process: whoever supervises it starts another."""
    caplog.set_level(logging.INFO)

    def fail(plan):
        raise error

    build = GatedBuild(ProvokedRunner(simulated_runner(), fail))
    build.opened.set()
    running = asyncio.create_task(serve(CONFIG, asyncio.Event(), build))
    await until(lambda: any(record.message == "ready" for record in caplog.records))
    (listening,) = [record for record in caplog.records if record.message == "listening"]
    async with grpc.aio.insecure_channel(listening.fields["address"]) as channel:
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        await stub.Attach(attach_request(1))
        assert (await refusal(stub.Forward(first()))).reason == "RUNNER_FAILED"
        failure = await asyncio.wait_for(running, PATIENCE)
    assert failure.startswith("broke: the device failed: ")
    assert "\n" not in failure


async def test_the_application_ends_with_an_error_when_the_port_is_taken():
    async with serving() as rig:
        port = int(rig.address.rpartition(":")[2])
        config = WorkerConfig(port=port, simulate=True)
        failure = await serve(config, asyncio.Event(), simulated_runner)
        assert failure == (
            f"can't listen on 127.0.0.1:{port}: Address already in use; another --port may do"
        )
