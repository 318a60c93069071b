"""A GrpcServer of one behaviour, under a method for each kind of RPC."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from twinplane.grpc.health import ServingState, SettableReadiness
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.grpc.options import Connections, Keepalive
from twinplane.grpc.server import GrpcServer, Service

SERVICE = "twinplane.test.v1.TestService"
STREAM = f"/{SERVICE}/Stream"
CALM = Connections(Keepalive(60_000, 60_000), peer_ping_ms=60_000)


class _Handlers(grpc.GenericRpcHandler):
    def __init__(self, behaviour: Any, deserializer: Callable[[bytes], Any] | None) -> None:
        self._handler = grpc.unary_stream_rpc_method_handler(behaviour, deserializer)

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return self._handler if details.method == STREAM else None


@asynccontextmanager
async def small_server(
    behaviour: Any,
    connections: Connections = CALM,
    *,
    interceptor: StatusInterceptor | None = None,
    deserializer: Callable[[bytes], Any] | None = None,
) -> AsyncIterator[int]:
    """Answers STREAM, whose request is one message, with `behaviour`. Yields the port."""
    readiness = SettableReadiness()
    handlers = _Handlers(behaviour, deserializer)
    server = GrpcServer(
        [Service(SERVICE, lambda it, to: to.add_generic_rpc_handlers((it,)), handlers)],
        readiness,
        interceptor or StatusInterceptor(lambda error: None, lambda *call: None, lambda: "error"),
        connections=connections,
    )
    address = await server.start("127.0.0.1", 0)
    try:
        yield int(address.rpartition(":")[2])
    finally:
        readiness.set(ServingState.ENDING)
        await server.stop(0.0)
