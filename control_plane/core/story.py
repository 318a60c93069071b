"""What happened to a request, for people who debug: the idea is dask's `story()`."""

from __future__ import annotations

from collections import deque

from control_plane.core.request import RequestId

_REMEMBERED_EVENTS = 4096


class Story:
    """The last changes of state over all requests: no tokens, nothing per step."""

    def __init__(self) -> None:
        self._events: deque[tuple[RequestId, int, str]] = deque(maxlen=_REMEMBERED_EVENTS)

    def tell(self, request_id: RequestId, step_id: int, event: str) -> None:
        """Notes an event that came after step `step_id` was planned."""
        self._events.append((request_id, step_id, event))

    def of(self, request_id: RequestId) -> list[str]:
        return [f"step {step}: {event}" for who, step, event in self._events if who == request_id]
