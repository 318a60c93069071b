"""grpc.health.v1 as a view of the worker's lifecycle.

Written here because grpc_health's own asyncio servicer holds a lock while it writes to a watcher,
so one watcher that does not read would block every change, and it never ends its watchers: a
server that stops would wait for them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from worker_service.lifecycle import Lifecycle, LifecycleState

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

# A failed worker serves: a new claim heals it, and nobody claims what is not serving.
_SERVING = frozenset({LifecycleState.ACTIVE, LifecycleState.FAILED})
_ENDING = frozenset({LifecycleState.DRAINING, LifecycleState.BROKEN})


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health is untyped
    """One answer for the server ("") and for the service named."""

    def __init__(self, lifecycle: Lifecycle, service: str) -> None:
        self._lifecycle = lifecycle
        self._services = frozenset({"", service})

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
        """The status now and at each change, until the worker ends.

        A slow reader sees the latest, not each.
        """
        last: int | None = None
        while True:
            state = self._lifecycle.state
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            if state in _ENDING:
                return
            await self._lifecycle.changed_from(state)

    def _status(self, service: str) -> int:
        response = health_pb2.HealthCheckResponse
        if service not in self._services:
            return int(response.SERVICE_UNKNOWN)
        serving = self._lifecycle.state in _SERVING
        return int(response.SERVING if serving else response.NOT_SERVING)
