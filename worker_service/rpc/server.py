"""The worker's gRPC server: what it serves, and with which bounds."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from pathlib import Path

from twinplane.bounds import WORKER_MESSAGE_BYTES
from twinplane.grpc.interceptors import CallEnd, StatusInterceptor
from twinplane.grpc.options import WORKER_CONNECTION_OPTIONS, Connections, Keepalive
from twinplane.grpc.server import GrpcServer, Service
from twinplane.process.logs import fields
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc
from worker_service.facade import WorkerFacade
from worker_service.rpc.errors import status_of
from worker_service.rpc.health import LifecycleReadiness
from worker_service.rpc.servicer import ModelRunnerServicer

SERVICE_NAME: str = model_runner_pb2.DESCRIPTOR.services_by_name["ModelRunnerService"].full_name

# A controller that vanished is noticed within 15 seconds.
WORKER_CONNECTIONS = Connections(Keepalive(idle_ms=10_000, answer_ms=5_000), peer_ping_ms=1_000)
# Each open call may hold a message of the largest size.
_MAX_OPEN_CALLS = 256

_logger = logging.getLogger(__name__)


class WorkerServer(GrpcServer):
    """ModelRunnerService over one facade. Health follows the facade's lifecycle, which must have
    ended before `stop`.

    `new_error_id` names unexpected errors, see StatusInterceptor. Below `weights_root` a controller
    may name files.
    """

    def __init__(
        self,
        facade: WorkerFacade,
        new_error_id: Callable[[], str] = lambda: secrets.token_hex(8),
        weights_root: Path | None = None,
    ) -> None:
        self._servicer = ModelRunnerServicer(facade, weights_root)
        add_to_server = model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server
        super().__init__(
            [Service(SERVICE_NAME, add_to_server, self._servicer)],
            LifecycleReadiness(facade.lifecycle),
            StatusInterceptor(
                status_of, _log_call, new_error_id, max_message_bytes=WORKER_MESSAGE_BYTES
            ),
            connections=WORKER_CONNECTIONS,
            options=WORKER_CONNECTION_OPTIONS,
            max_open_calls=_MAX_OPEN_CALLS,
        )

    async def released(self, quiet_seconds: float) -> None:
        """Waits, in a drain, until no controller needs this worker; see the servicer's."""
        await self._servicer.released(quiet_seconds)

    def end_streams(self) -> None:
        """Stops reading Execute streams. This is part of a drain; call it before `stop`."""
        self._servicer.end_streams()


def _log_call(end: CallEnd) -> None:
    if _logger.isEnabledFor(logging.DEBUG):
        _logger.debug(
            "call ended",
            extra=fields(
                method=end.method,
                code=end.code,
                reason=end.reason,
                duration_seconds=round(end.seconds, 6),
            ),
        )
