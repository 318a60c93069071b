"""What a worker's status becomes on the controller's side: a refusal with a reason, or a loss."""

from __future__ import annotations

import asyncio
import http.server
import re
import socketserver
import threading
from array import array
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.core.plan import AddedSequence, Row, ScheduledRows, StepPlan, WeightVersion
from control_plane.core.request import OutputKind, SamplingParams
from control_plane.rpc.server import ControlServer, inference_service
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.ports import (
    RefusalReason,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from tests.support import worker_rig
from twinplane.grpc.health import SettableReadiness
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.grpc.status import Status, abort
from twinplane.inference.v1 import inference_pb2_grpc
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc


class Refusing(model_runner_pb2_grpc.ModelRunnerServiceServicer):
    """Ends each claim with one status."""

    def __init__(self, status: Status) -> None:
        self._status = status

    async def GetWorkerInfo(self, request: object, context: grpc.aio.ServicerContext) -> None:  # noqa: N802
        if self._status.reason:
            await abort(context, self._status)
        await context.abort(self._status.code, self._status.message)


async def claim(status: Status) -> Exception:
    """What a claim raises."""
    server = grpc.aio.server()
    model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(Refusing(status), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    worker = GrpcWorker(f"127.0.0.1:{port}", controller_id="test")
    try:
        with pytest.raises((WorkerLost, WorkerRefused, WorkerUnusable)) as raised:
            await worker.attach()
        return raised.value
    finally:
        await worker.detach()
        await server.stop(0)


async def test_a_reason_makes_a_refusal() -> None:
    error = await claim(Status(grpc.StatusCode.UNAVAILABLE, "WORKER_LOADING", "it loads"))
    assert isinstance(error, WorkerRefused)
    assert error.reason is RefusalReason.WORKER_LOADING
    assert str(error) == "WORKER_LOADING: it loads"


async def test_a_reason_that_the_controller_does_not_know_is_told_to_people() -> None:
    error = await claim(Status(grpc.StatusCode.ABORTED, "FROM_A_NEWER_WORKER", "so it is"))
    assert isinstance(error, WorkerRefused)
    assert error.reason is RefusalReason.UNKNOWN
    assert "FROM_A_NEWER_WORKER: so it is" in str(error)


async def test_a_status_without_a_reason_is_a_loss() -> None:
    error = await claim(Status(grpc.StatusCode.UNAVAILABLE, "", "connection reset"))
    assert isinstance(error, WorkerLost)
    assert re.fullmatch(
        r"no worker answers at 127\.0\.0\.1:\d+ \(UNAVAILABLE: connection reset\)", str(error)
    )


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code.value[0]])
async def test_a_status_that_no_connection_causes_is_no_worker(code: grpc.StatusCode) -> None:
    """Without a reason: nothing of ours answers so."""
    error = await claim(Status(code, "", "said so"))
    is_other = code.name in (
        "UNIMPLEMENTED", "NOT_FOUND", "PERMISSION_DENIED", "UNAUTHENTICATED",
    )  # fmt: skip
    assert isinstance(error, WorkerUnusable if is_other else WorkerLost)
    assert f"{code.name}: said so" in str(error)
    assert re.search(r"127\.0\.0\.1:\d+", str(error))
    assert ("is another service, not a worker" in str(error)) == is_other


class Http(http.server.BaseHTTPRequestHandler):
    """Speaks HTTP/1, and logs nothing."""

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def shouting(banner: bytes) -> Iterator[str]:
    """A server that says something else than HTTP/2, to whoever connects."""

    class Shout(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(banner)
            self.request.recv(1)

    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), Shout)) as address:
        yield address


@contextmanager
def serving(server: socketserver.TCPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def http_server() -> Iterator[str]:
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Http)) as address:
        yield address


@pytest.mark.parametrize(
    "server",
    [http_server, lambda: shouting(b"SSH-2.0-OpenSSH_9\r\n"), lambda: shouting(b"-ERR what\r\n")],
    ids=["http", "ssh", "redis"],
)
async def test_what_speaks_no_grpc_is_no_worker(
    server: Callable[[], AbstractContextManager[str]],
) -> None:
    with server() as address:
        worker = GrpcWorker(address, controller_id="test")
        with pytest.raises(WorkerUnusable, match=f"{address} is not a worker: .* not speak gRPC"):
            await worker.attach()
        await worker.detach()


async def test_of_two_controllers_the_first_hears_of_the_second() -> None:
    async with worker_rig.serving() as rig:
        first, second = (GrpcWorker(rig.address, controller_id=name) for name in ("a:1", "b:2"))
        try:
            await first.attach()
            waiting = asyncio.ensure_future(first.receive())
            await first.ping()
            await second.attach()
            with pytest.raises(WorkerRefused, match="'b:2' has claimed the worker") as raised:
                await asyncio.wait_for(waiting, 60)
            assert raised.value.reason is RefusalReason.STALE_EPOCH
        finally:
            await first.detach()
            await second.detach()


async def test_a_control_plane_is_told_from_a_worker() -> None:
    """Also one that has no worker itself, and is not serving."""
    readiness = SettableReadiness()
    servicer = inference_pb2_grpc.InferenceServiceServicer()
    interceptor = StatusInterceptor(lambda error: None, lambda method, code: None, lambda: "e")
    server = ControlServer([inference_service(servicer)], readiness, interceptor)
    address = await server.start("127.0.0.1", 0)
    worker = GrpcWorker(address, controller_id="test")
    try:
        with pytest.raises(WorkerUnusable, match=f"{address} is a control plane, not a worker"):
            await worker.attach()
    finally:
        await worker.detach()
        await server.stop(0.0)


async def test_a_refusal_names_its_step_and_rows() -> None:
    metadata = {"step_id": "7", "rows": "3,12"}
    code = grpc.StatusCode.INVALID_ARGUMENT
    error = await claim(Status(code, "INVALID_PLAN", "no", metadata=metadata))
    assert isinstance(error, WorkerRefused)
    assert (error.step_id, error.rows) == (7, (3, 12))


@pytest.mark.parametrize(
    "metadata",
    [{}, {"step_id": ""}, {"step_id": "-1", "rows": "a"}, {"rows": "1,,2"}, {"rows": "9" * 5000}],
)
async def test_what_a_refusal_does_not_say_well_is_not_known(metadata: dict[str, str]) -> None:
    code = grpc.StatusCode.INVALID_ARGUMENT
    error = await claim(Status(code, "INVALID_PLAN", "no", metadata=metadata))
    assert isinstance(error, WorkerRefused)
    assert (error.step_id, error.rows) == (0, ())


class Open(model_runner_pb2_grpc.ModelRunnerServiceServicer):
    """Grants each claim and reads what is sent."""

    async def GetWorkerInfo(  # noqa: N802
        self, request: object, context: object
    ) -> model_runner_pb2.GetWorkerInfoResponse:
        return model_runner_pb2.GetWorkerInfoResponse()

    async def Attach(self, request: object, context: object) -> model_runner_pb2.AttachResponse:  # noqa: N802
        return model_runner_pb2.AttachResponse()

    async def GetMemoryPool(  # noqa: N802
        self, request: object, context: object
    ) -> model_runner_pb2.GetMemoryPoolResponse:
        return model_runner_pb2.GetMemoryPoolResponse()

    async def Execute(self, requests: AsyncIterator[object], context: object) -> None:  # noqa: N802
        async for _ in requests:
            pass


async def test_what_no_message_can_hold_is_the_fault_of_its_sequence() -> None:
    """It was a ValueError, which ended the control plane."""
    server = grpc.aio.server()
    model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(Open(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    worker = GrpcWorker(f"127.0.0.1:{port}", controller_id="test")
    sequences = [
        AddedSequence(
            Row(row), array("I", [1]), 1, SamplingParams(), seed, OutputKind.SAMPLE, [], 0
        )
        for row, seed in ((4, 1), (5, 2**64), (6, -1))
    ]
    plan = StepPlan(1, 3, WeightVersion(1, "w"), [], sequences, ScheduledRows())
    try:
        await worker.attach()
        with pytest.raises(WorkerRefused) as raised:
            await worker.send(plan)
        assert raised.value.reason is RefusalReason.INVALID_PLAN
        assert (raised.value.step_id, raised.value.rows) == (3, (5, 6))
    finally:
        await worker.detach()
        await server.stop(0)


class Health(health_pb2_grpc.HealthServicer):
    """Answers with one status, None for well."""

    def __init__(self, code: grpc.StatusCode | None) -> None:
        self._code = code

    async def Check(self, request: object, context: grpc.aio.ServicerContext) -> object:  # noqa: N802
        if self._code is not None:
            await context.abort(self._code, "no")
        return health_pb2.HealthCheckResponse()


NO_LIFE = grpc.StatusCode.UNAVAILABLE
CODES = [None, *(code for code in grpc.StatusCode if code is not grpc.StatusCode.OK)]


@pytest.mark.parametrize("code", CODES)
async def test_any_answer_but_unavailable_is_a_sign_of_life(code: grpc.StatusCode | None) -> None:
    """An older worker may not know the service, a full one may refuse the call: both live."""
    async with worker_rig.serving() as rig:
        other = grpc.aio.server()
        health_pb2_grpc.add_HealthServicer_to_server(Health(code), other)
        port = other.add_insecure_port("127.0.0.1:0")
        await other.start()
        worker = GrpcWorker(rig.address, controller_id="test")
        await worker.attach()
        await worker.ping()
        channel, worker._channel = worker._channel, grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        try:
            if code is NO_LIFE:
                with pytest.raises(WorkerLost):
                    await worker.ping()
            else:
                await worker.ping()
        finally:
            await worker.detach()
            assert channel is not None
            await channel.close()
            await other.stop(0)


async def test_who_is_not_attached_has_nobody_to_ping() -> None:
    with pytest.raises(WorkerLost, match="not attached"):
        await GrpcWorker("127.0.0.1:1", controller_id="test").ping()
