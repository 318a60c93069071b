"""The control plane's gRPC server: what it serves, and with which bounds."""

from __future__ import annotations

from collections.abc import Sequence

from twinplane.control.v1 import control_pb2, control_pb2_grpc
from twinplane.grpc.health import ServingState, SettableReadiness
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.grpc.options import FIXED_WINDOW, Connections, Keepalive
from twinplane.grpc.server import GrpcServer, Service
from twinplane.inference.v1 import inference_pb2, inference_pb2_grpc

MAX_REQUEST_BYTES = 4 * 1024 * 1024
_INFERENCE_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
INFERENCE_SERVICE_NAME: str = _INFERENCE_SERVICE.full_name
INFERENCE_METHODS: tuple[str, ...] = tuple(
    f"/{INFERENCE_SERVICE_NAME}/{method.name}" for method in _INFERENCE_SERVICE.methods
)
"""As gRPC and the metrics name them."""
_CONTROL_SERVICE = control_pb2.DESCRIPTOR.services_by_name["ControlService"]
CONTROL_SERVICE_NAME: str = _CONTROL_SERVICE.full_name
CONTROL_METHODS: tuple[str, ...] = tuple(
    f"/{CONTROL_SERVICE_NAME}/{method.name}" for method in _CONTROL_SERVICE.methods
)

# Clients may ping every five seconds; common defaults are slower. A client that vanished is noticed
# within 30 seconds.
CLIENT_CONNECTIONS = Connections(
    Keepalive(idle_ms=20_000, answer_ms=10_000), peer_ping_ms=5_000, age_ms=30 * 60 * 1_000
)
MAX_CALLS_OF_A_CONNECTION = 4096

_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # More of them wait in the client.
    ("grpc.max_concurrent_streams", MAX_CALLS_OF_A_CONNECTION),
    FIXED_WINDOW,
)


def inference_service(servicer: inference_pb2_grpc.InferenceServiceServicer) -> Service:
    """The clients' service."""
    add_to_server = inference_pb2_grpc.add_InferenceServiceServicer_to_server
    return Service(INFERENCE_SERVICE_NAME, add_to_server, servicer)


def control_service(servicer: control_pb2_grpc.ControlServiceServicer) -> Service:
    """The operators' service."""
    add_to_server = control_pb2_grpc.add_ControlServiceServicer_to_server
    return Service(CONTROL_SERVICE_NAME, add_to_server, servicer)


class ControlServer(GrpcServer):
    """The services of the control plane. Health answers what `readiness` says."""

    def __init__(
        self,
        services: Sequence[Service],
        readiness: SettableReadiness,
        interceptor: StatusInterceptor,
        *,
        connections: Connections = CLIENT_CONNECTIONS,
    ) -> None:
        super().__init__(
            services, readiness, interceptor, connections=connections, options=_OPTIONS
        )
        self._readiness = readiness

    async def stop(self, grace: float) -> None:
        """Ends the readiness and with it Health.Watch calls, then stops as GrpcServer does."""
        self._readiness.set(ServingState.ENDING)
        await super().stop(grace)
