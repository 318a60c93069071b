"""grpc.health.v1 over one truth: whether the server and its services serve.

Written here because grpc_health's own asyncio servicer holds a lock while it writes to a watcher,
so one watcher that does not read would block every change, and it never ends its watchers: a
server that stops would wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from enum import Enum
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name


class ServingState(Enum):
    """What is answered. ENDING is NOT_SERVING for good: a watch says so and ends."""

    NOT_SERVING = "not serving"
    SERVING = "serving"
    ENDING = "ending"


class Readiness(Protocol):
    """A state that the answers follow. Used on the event loop only."""

    @property
    def state(self) -> ServingState:
        """The state now."""
        ...

    async def changed_from(self, seen: ServingState) -> None:
        """Returns when the state is another than `seen`; states in between may be missed."""
        ...


class SettableReadiness:
    """A Readiness that is told: NOT_SERVING at first."""

    def __init__(self) -> None:
        self._state = ServingState.NOT_SERVING
        self._changed = asyncio.Event()

    @property
    def state(self) -> ServingState:
        """See Readiness."""
        return self._state

    async def changed_from(self, seen: ServingState) -> None:
        """See Readiness."""
        while self._state is seen:
            await self._changed.wait()

    def set_serving(self, serving: bool) -> None:
        """Changes between SERVING and NOT_SERVING, except that nothing follows ENDING."""
        self.set(ServingState.SERVING if serving else ServingState.NOT_SERVING)

    def set(self, state: ServingState) -> None:
        """Changes the state, except that nothing follows ENDING."""
        if self._state is not ServingState.ENDING:
            self._state = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health is untyped
    """One answer for the whole server ("") and each of `services`."""

    def __init__(self, readiness: Readiness, services: Iterable[str]) -> None:
        self._readiness = readiness
        self._services = frozenset(("", *services))

    async def Check(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        """The status of a service; NOT_FOUND for one that is not here."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._answer(request.service, self._readiness.state)

    async def Watch(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """The status now and at each change, until the server ends.

        A slow reader sees the latest, not each.
        """
        last: Any = None
        while True:
            state = self._readiness.state
            answer = self._answer(request.service, state)
            if answer != last:
                last = answer
                yield answer
            if state is ServingState.ENDING:
                return
            await self._readiness.changed_from(state)

    def _answer(self, service: str, state: ServingState) -> Any:
        response = health_pb2.HealthCheckResponse
        if service not in self._services:
            return response(status=response.SERVICE_UNKNOWN)
        serving = state is ServingState.SERVING
        return response(status=response.SERVING if serving else response.NOT_SERVING)
