"""grpc.health.v1 over one truth: whether the server and its services serve.

We do not use grpc_health's own asyncio servicer, for two reasons. It holds a lock while it writes
to a watcher, so one watcher that does not read blocks every change. And it never ends its watches,
so a server that stops waits for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from enum import Enum
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
LIVENESS = "liveness"
"""The name that is SERVING for as long as the process answers, whatever it can do."""
READINESS = "readiness"
"""Another name for what the whole server ("") answers: whether it takes work."""


class ServingState(Enum):
    """What health answers. ENDING answers NOT_SERVING for good: a watch says so and ends."""

    NOT_SERVING = "not serving"
    SERVING = "serving"
    ENDING = "ending"


class Readiness(Protocol):
    """The state that the answers follow. Used on the event loop only."""

    @property
    def state(self) -> ServingState:
        """The state now."""
        ...

    async def changed_from(self, seen: ServingState) -> None:
        """Returns once the state differs from `seen`; states in between may be missed."""
        ...


class SettableReadiness:
    """A Readiness that its owner sets. It starts as NOT_SERVING."""

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
        """Sets SERVING or NOT_SERVING, unless the state is ENDING."""
        self.set(ServingState.SERVING if serving else ServingState.NOT_SERVING)

    def set(self, state: ServingState) -> None:
        """Changes the state, unless it is ENDING: that is final."""
        if self._state is not ServingState.ENDING:
            self._state = state
            changed, self._changed = self._changed, asyncio.Event()
            changed.set()


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # grpc_health is untyped
    """Gives the whole server ("", READINESS) and each of `services` the same answer: whether it
    takes work. LIVENESS is another matter: a process that loads, drains or waits must not be
    restarted for that.
    """

    def __init__(self, readiness: Readiness, services: Iterable[str]) -> None:
        self._readiness = readiness
        self._services = frozenset(("", READINESS, LIVENESS, *services))

    async def Check(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        """Answers a service's status. Aborts with NOT_FOUND when the server has no such service."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return self._answer(request.service, self._readiness.state)

    async def Watch(  # noqa: N802
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """Answers the status now and at each change, until the server ends.

        A slow reader may miss states in between; it always gets the latest.
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
        serving = state is ServingState.SERVING or service == LIVENESS
        return response(status=response.SERVING if serving else response.NOT_SERVING)
