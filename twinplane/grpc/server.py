"""A gRPC server of either plane: its services, their health, reflection, and how it stops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from twinplane.grpc.health import SERVICE_NAME as HEALTH_SERVICE_NAME
from twinplane.grpc.health import HealthServicer, Readiness
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.grpc.listen import listen
from twinplane.grpc.options import LEFT_PACKED, SERVER_OPTIONS, Connections, Option
from twinplane.grpc.unknown_methods import UnknownMethods


@dataclass(frozen=True, slots=True)
class Service:
    """A service to be served: its full name, the generated function that adds a servicer to a
    server, and the servicer.
    """

    name: str
    add_to_server: Callable[[Any, grpc.aio.Server], None]
    servicer: object


class GrpcServer:
    """grpc.aio with `services`, health for each of them, and reflection.

    `interceptor` receives all messages. `options` are added to those that all servers share. More
    than `max_open_calls` open calls are refused with RESOURCE_EXHAUSTED; None sets no bound.
    """

    def __init__(
        self,
        services: Sequence[Service],
        readiness: Readiness,
        interceptor: StatusInterceptor,
        *,
        connections: Connections,
        options: Sequence[Option] = (),
        max_open_calls: int | None = None,
    ) -> None:
        self._socket: Path | None = None
        names = [service.name for service in services]
        self._server = grpc.aio.server(
            interceptors=[UnknownMethods(names), interceptor],
            options=(*SERVER_OPTIONS, LEFT_PACKED, *connections.options(), *options),
            maximum_concurrent_rpcs=max_open_calls,
        )
        for service in services:
            service.add_to_server(service.servicer, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(readiness, names), self._server)
        reflection.enable_server_reflection(
            (*names, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    async def start(self, host: str, port: int, uds: Path | None = None) -> str:
        """Listens on the Unix socket if one is given, otherwise on host:port; returns the address.

        Raises CannotListen.
        """
        address = listen(self._server, host, port, uds)
        self._socket = uds
        await self._server.start()
        return address

    async def stop(self, grace: float) -> None:
        """Refuses new calls at once, gives open ones `grace` seconds, then cancels them.

        The readiness must be ENDING before this is called: that is what ends Health.Watch calls.
        """
        await self._server.stop(grace)
        if self._socket is not None:
            self._socket.unlink(missing_ok=True)
