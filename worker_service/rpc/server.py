"""The worker's gRPC server: what listens, with which bounds, and how it stops."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twinplane.grpc.health import SERVICE_NAME as HEALTH_SERVICE_NAME
from twinplane.grpc.health import HealthServicer
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.grpc.listen import listen
from twinplane.grpc.options import SERVER_OPTIONS, WORKER_CONNECTION_OPTIONS
from twinplane.process.logs import fields
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc
from worker_service.facade import WorkerFacade
from worker_service.rpc.errors import status_of
from worker_service.rpc.health import LifecycleReadiness
from worker_service.rpc.servicer import ModelRunnerServicer

SERVICE_NAME: str = model_runner_pb2.DESCRIPTOR.services_by_name["ModelRunnerService"].full_name

_OPTIONS = (
    *SERVER_OPTIONS,
    *WORKER_CONNECTION_OPTIONS,
    # Controllers may ping every second.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
)
_logger = logging.getLogger(__name__)

# Each open call may hold a message of the largest size.
_MAX_OPEN_CALLS = 256


class WorkerServer:
    """grpc.aio with ModelRunnerService, health and reflection over one facade.

    `new_error_id` names unexpected errors, see StatusInterceptor.
    """

    def __init__(
        self, facade: WorkerFacade, new_error_id: Callable[[], str] = lambda: secrets.token_hex(8)
    ) -> None:
        self._facade = facade
        self._servicer = ModelRunnerServicer(facade)
        self._server = grpc.aio.server(
            interceptors=[StatusInterceptor(status_of, _log_call, new_error_id)],
            options=_OPTIONS,
            maximum_concurrent_rpcs=_MAX_OPEN_CALLS,
        )
        self._socket: Path | None = None
        model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(
            HealthServicer(LifecycleReadiness(facade.lifecycle), [SERVICE_NAME]), self._server
        )
        reflection.enable_server_reflection(
            (SERVICE_NAME, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, host: str, port: int, uds: Path | None = None) -> str:
        """Listens on the Unix socket if there is one, else on host:port; returns the address.

        Raises CannotListen.
        """
        address = listen(self._server, host, port, uds)
        self._socket = uds
        await self._server.start()
        return address

    def end_streams(self) -> None:
        """Reads nothing more from Execute streams: part of a drain, before `stop`."""
        self._servicer.end_streams()

    async def stop(self, grace: float) -> None:
        """Refuses new calls at once, gives open ones `grace` seconds, then cancels them.

        The lifecycle must have ended before: Health.Watch calls end with it.
        """
        await self._server.stop(grace)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)


def _log_call(method: str, code: str) -> None:
    _logger.debug("call ended", extra=fields(method=method, code=code))
