"""The worker's gRPC server: what listens, with which bounds, and how it stops."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc
from worker_service.facade import WorkerFacade
from worker_service.rpc.health import SERVICE_NAME as HEALTH_SERVICE_NAME
from worker_service.rpc.health import HealthServicer
from worker_service.rpc.servicer import ModelRunnerServicer

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
SERVICE_NAME: str = model_runner_pb2.DESCRIPTOR.services_by_name["ModelRunnerService"].full_name

_OPTIONS = (
    # Two servers on one port would each get some of the calls, silently.
    ("grpc.so_reuseport", 0),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Controllers may ping every second, with or without a call.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # A controller that vanished without a word is noticed, and its stream ended.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)
# Each open call may hold a message of the size above.
_MAX_OPEN_CALLS = 256


class CannotListen(Exception):
    """An address could not be bound; the message names it and says why."""


class WorkerServer:
    """grpc.aio with ModelRunnerService, health and reflection over one facade."""

    def __init__(self, facade: WorkerFacade) -> None:
        self._facade = facade
        self._servicer = ModelRunnerServicer(facade)
        self._server = grpc.aio.server(options=_OPTIONS, maximum_concurrent_rpcs=_MAX_OPEN_CALLS)
        self._socket_path: Path | None = None
        model_runner_pb2_grpc.add_ModelRunnerServiceServicer_to_server(self._servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(
            HealthServicer(facade.lifecycle, SERVICE_NAME), self._server
        )
        reflection.enable_server_reflection(
            (SERVICE_NAME, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, host: str, port: int, uds: Path | None = None) -> str:
        """Listens on host:port (port 0: any free one) or on a Unix socket; returns the address.

        The socket is its owner's alone (0600), and one left behind by a dead process is replaced.
        Raises CannotListen.
        """
        if uds is not None:
            address = self._bind_socket(uds)
        else:
            literal = f"[{host}]" if ":" in host else host
            address = f"{literal}:{self._bind(f'{literal}:{port}')}"
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
        if self._socket_path is not None:
            self._socket_path.unlink(missing_ok=True)

    def _bind(self, address: str) -> int:
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise CannotListen(f"can't listen on {address}: is it taken by another?") from error
        if port == 0:
            raise CannotListen(f"can't listen on {address}")
        return port

    def _bind_socket(self, path: Path) -> str:
        path = path.absolute()
        _remove_stale_socket(path)
        address = f"unix:{path}"
        # The mode a socket is made with is the only one without a moment in which it is open.
        mask = os.umask(0o177)
        try:
            self._bind(address)
        finally:
            os.umask(mask)
        self._socket_path = path
        return address


def _remove_stale_socket(path: Path) -> None:
    """Removes a socket that nobody listens on. Raises CannotListen for anything else in the way."""
    if not path.exists():
        return
    if not path.is_socket():
        raise CannotListen(f"can't listen on {path}: it exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
        except OSError as error:
            raise CannotListen(f"can't listen on {path}: {error.strerror}") from error
        else:
            raise CannotListen(f"can't listen on {path}: another process does")
