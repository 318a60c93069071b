"""Waits for a server's grpc.health.v1 to say SERVING."""

from __future__ import annotations

import asyncio

_EVERY_SECONDS = 0.1
_ANSWER_SECONDS = 2.0


class Health:
    """The health of the server at `address` (host:port or unix:PATH)."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def serving(self) -> None:
        """Returns when the server serves; asks until then."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        options = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 200))
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    answer = await stub.Check(
                        health_pb2.HealthCheckRequest(), timeout=_ANSWER_SECONDS
                    )
                except grpc.aio.AioRpcError:
                    pass  # not listening yet
                else:
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(_EVERY_SECONDS)
