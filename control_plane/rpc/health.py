"""grpc.health.v1 over one truth: serving or not, for the server and each of its services.

Written here because grpc_health's own asyncio servicer holds a lock while it writes to a watcher,
so one watcher that does not read would block every change, and it never ends its watchers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = "grpc.health.v1.Health"

_Status = int


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health is untyped
    """Answers for the whole server ("") and `services`, all NOT_SERVING at first."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Changes the answer of every service and tells the watchers."""
        if serving != self._serving and not self._closed:
            self._serving = serving
            self._wake()

    def close(self) -> None:
        """NOT_SERVING from now on; every watch says so once and ends, so that the server can."""
        self._serving = False
        self._closed = True
        self._wake()

    async def Check(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        """The status of a service; NOT_FOUND for one that is not here."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """The status now and at each change. A slow reader sees the latest, not each."""
        last: _Status | None = None
        while True:
            changed, closed = self._changed, self._closed
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if closed:
                return
            await changed.wait()

    def _status(self, service: str) -> _Status:
        response = health_pb2.HealthCheckResponse
        if service not in self._services:
            return int(response.SERVICE_UNKNOWN)
        return int(response.SERVING if self._serving else response.NOT_SERVING)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
