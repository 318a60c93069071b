"""Waits until a server reports SERVING by grpc.health.v1."""

from __future__ import annotations

import asyncio

_RETRY_SECONDS = 0.1


class Health:
    """The health of the server at `address` (host:port or unix:PATH)."""

    def __init__(self, address: str) -> None:
        self._address = address

    async def serving(self) -> None:
        """Returns as soon as the server serves. Until it listens, tries again and again."""
        import grpc
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        from twinplane.grpc.options import NO_PROXY

        options = (
            NO_PROXY,
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 100),
        )
        async with grpc.aio.insecure_channel(self._address, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                try:
                    async for answer in stub.Watch(health_pb2.HealthCheckRequest()):
                        if answer.status == health_pb2.HealthCheckResponse.SERVING:
                            return
                except grpc.aio.AioRpcError:
                    pass  # it does not listen yet, or no longer
                await asyncio.sleep(_RETRY_SECONDS)
