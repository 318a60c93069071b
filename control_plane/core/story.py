"""What happened to a sequence, for people who debug: the idea is dask's `story()`."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from control_plane.core.request import SequenceId

_REMEMBERED_EVENTS = 4096


class Story:
    """The last changes of state over all sequences: no tokens, nothing per step."""

    def __init__(self) -> None:
        self._events: deque[tuple[SequenceId, int, str]] = deque(maxlen=_REMEMBERED_EVENTS)

    def tell(self, sequence_id: SequenceId, step_id: int, event: str) -> None:
        """Notes an event that came after step `step_id` was planned."""
        self._events.append((sequence_id, step_id, event))

    def of(self, sequence_ids: Collection[SequenceId]) -> list[str]:
        """The remembered events of these sequences, oldest first."""
        return [
            f"sequence {sequence_id}, step {step_id}: {event}"
            for sequence_id, step_id, event in self._events
            if sequence_id in sequence_ids
        ]
