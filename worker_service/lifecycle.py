"""The life of a worker: loading, active, failed, finishing, draining, broken. No gRPC, no torch.

    LOADING ──▶ ACTIVE ◀──▶ FAILED        any of these ──▶ FINISHING, or DRAINING at once
       └──────────┴───────────┴──▶ BROKEN  (from FINISHING and DRAINING too)

FINISHING goes on with the controller that holds the worker, and takes no other. DRAINING accepts
nothing, and executes what is queued. FAILED lasts for one epoch: the runner raised an unexpected
error, and every plan is refused until a new claim resets it. BROKEN is final: loading or a reset
failed, and only a new process helps.
"""

from __future__ import annotations

import asyncio
from enum import Enum

from worker_service.domain.errors import RunnerFailed, WorkerDraining, WorkerLoading


class LifecycleState(Enum):
    """Where in its life a worker is."""

    LOADING = "loading"
    ACTIVE = "active"
    FAILED = "failed"
    FINISHING = "finishing"
    DRAINING = "draining"
    BROKEN = "broken"


_STOPPING = frozenset({LifecycleState.FINISHING, LifecycleState.DRAINING, LifecycleState.BROKEN})
_NEXT: dict[LifecycleState, frozenset[LifecycleState]] = {
    LifecycleState.LOADING: _STOPPING | {LifecycleState.ACTIVE},
    LifecycleState.ACTIVE: _STOPPING | {LifecycleState.FAILED},
    LifecycleState.FAILED: _STOPPING | {LifecycleState.ACTIVE},
    LifecycleState.FINISHING: frozenset({LifecycleState.DRAINING, LifecycleState.BROKEN}),
    LifecycleState.DRAINING: frozenset({LifecycleState.BROKEN}),
    LifecycleState.BROKEN: frozenset(),
}


class Lifecycle:
    """The current state, and a way to wait for its change. Used on the event loop only."""

    def __init__(self) -> None:
        self._state = LifecycleState.LOADING
        self._changed = asyncio.Event()

    @property
    def state(self) -> LifecycleState:
        return self._state

    @property
    def is_ready(self) -> bool:
        """Whether the worker is loaded and not stopping. A FAILED one is: a new claim heals it."""
        return self._state in (LifecycleState.ACTIVE, LifecycleState.FAILED)

    def move(self, state: LifecycleState) -> None:
        """Changes the state. An impossible change is a bug of ours."""
        assert state in _NEXT[self._state], f"{self._state.name} -> {state.name}"
        self._state = state
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def can_move(self, state: LifecycleState) -> bool:
        """Whether `move` may be called with this state."""
        return state in _NEXT[self._state]

    async def changed_from(self, seen: LifecycleState) -> LifecycleState:
        """Waits until the state differs from `seen`; states in between may be missed."""
        while self._state is seen:
            await self._changed.wait()
        return self._state

    def require_serving(self) -> None:
        """Raises WorkerLoading, WorkerDraining or RunnerFailed unless a claim is served.

        A FAILED worker counts as serving: a new claim is what heals it.
        """
        match self._state:
            case LifecycleState.ACTIVE | LifecycleState.FAILED | LifecycleState.FINISHING:
                return
            case LifecycleState.LOADING:
                raise WorkerLoading("the worker loads its model")
            case LifecycleState.DRAINING:
                raise WorkerDraining("the worker drains")
            case LifecycleState.BROKEN:
                raise RunnerFailed("the worker is broken and ends")
