"""The control plane's gRPC server: what listens, with which bounds, and how it stops."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twinplane.grpc.health import SERVICE_NAME as HEALTH_SERVICE_NAME
from twinplane.grpc.health import HealthServicer, ServingState, SettableReadiness
from twinplane.grpc.listen import listen
from twinplane.grpc.options import SERVER_OPTIONS
from twinplane.inference.v1 import inference_pb2, inference_pb2_grpc

MAX_REQUEST_BYTES = 4 * 1024 * 1024
INFERENCE_SERVICE_NAME = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name

_OPTIONS = (
    *SERVER_OPTIONS,
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # Clients may ping every five seconds; common defaults are slower.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
)


class ControlServer:
    """grpc.aio with the inference service, health and reflection."""

    def __init__(
        self,
        servicer: inference_pb2_grpc.InferenceServiceServicer,
        interceptors: Sequence[grpc.aio.ServerInterceptor],
    ) -> None:
        self._socket: Path | None = None
        self._readiness = SettableReadiness()
        self._server = grpc.aio.server(interceptors=list(interceptors), options=_OPTIONS)
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(
            HealthServicer(self._readiness, [INFERENCE_SERVICE_NAME]), self._server
        )
        reflection.enable_server_reflection(
            (INFERENCE_SERVICE_NAME, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, host: str, port: int, uds: Path | None) -> str:
        """Listens on the Unix socket if there is one, else on host:port; returns the address.

        Raises CannotListen.
        """
        address = listen(self._server, host, port, uds)
        self._socket = uds
        await self._server.start()
        return address

    def set_serving(self, serving: bool) -> None:
        """What health answers."""
        self._readiness.set(ServingState.SERVING if serving else ServingState.NOT_SERVING)

    async def stop(self, grace: float) -> None:
        """Refuses new calls at once, gives open ones `grace` seconds, then cancels them."""
        self._readiness.set(ServingState.ENDING)
        await self._server.stop(grace)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
