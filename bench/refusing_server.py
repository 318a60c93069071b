"""A bare grpc.aio server that refuses every call at once: the floor of bench/refusals.py.

usage: python -m bench.refusing_server PORT

Its calls are streams to it, so that it needs no message, and its status has no details.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from twinplane.grpc.health import HealthServicer, ServingState, SettableReadiness
from twinplane.process.event_loop import new_event_loop
from twinplane.process.stop_signals import StopSignals


class Refusing(grpc.GenericRpcHandler):
    """Refuses whatever is not health."""

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        if details.method.startswith("/grpc.health."):
            return None
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    async def _refuse(self, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")


async def run(port: int) -> None:
    readiness = SettableReadiness()
    readiness.set(ServingState.SERVING)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Refusing(),))
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(readiness, ()), server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    with StopSignals(watch_stdin=False) as signals:
        await server.start()
        await signals.first.wait()
        await server.stop(0.0)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(int(sys.argv[1])))
