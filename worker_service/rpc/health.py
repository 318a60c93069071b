"""What grpc.health.v1 says about a worker: its lifecycle, as seen from outside."""

from __future__ import annotations

from typing import assert_never

from twinplane.grpc.health import ServingState
from worker_service.lifecycle import Lifecycle, LifecycleState


class LifecycleReadiness:
    """twinplane.grpc.health.Readiness over a lifecycle."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    @property
    def state(self) -> ServingState:
        """See Readiness."""
        return _serving_state(self._lifecycle.state)

    async def changed_from(self, seen: ServingState) -> None:
        """See Readiness."""
        state = self._lifecycle.state
        while _serving_state(state) is seen:
            state = await self._lifecycle.changed_from(state)


def _serving_state(state: LifecycleState) -> ServingState:
    match state:
        case LifecycleState.LOADING:
            return ServingState.NOT_SERVING
        case LifecycleState.ACTIVE | LifecycleState.FAILED:
            # A failed worker counts as serving: a new claim heals it, and a controller that waits
            # for health before it claims must not wait forever.
            return ServingState.SERVING
        case LifecycleState.FINISHING | LifecycleState.DRAINING | LifecycleState.BROKEN:
            return ServingState.ENDING
        case _:
            assert_never(state)
