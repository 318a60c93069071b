"""What a worker's status becomes on the controller's side: a refusal with a reason, or a loss."""

from __future__ import annotations

import grpc
import pytest

from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.ports import RefusalReason, WorkerLost, WorkerRefused
from twinplane.grpc.status import Status, abort
from twinplane.worker.v1 import model_runner_pb2_grpc


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
        with pytest.raises((WorkerLost, WorkerRefused)) as raised:
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
    assert str(error) == "UNAVAILABLE: connection reset"
