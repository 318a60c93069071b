"""Accept, queue or refuse: decided when a request comes, before anything is spent on it."""

from __future__ import annotations

from collections import deque

from control_plane.core.config import SchedulerConfig
from control_plane.core.errors import QueueFull, RequestTooLong
from control_plane.core.request import Request

_REMEMBERED_STARTS = 64
_LEAST_RETRY_SECONDS = 1.0
_MAX_RETRY_SECONDS = 60.0


class Admission:
    """Knows the limits, and how fast the queue has been moving."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._starts: deque[float] = deque(maxlen=_REMEMBERED_STARTS)

    def check(self, request: Request, live_count: int) -> None:
        """Raises RequestTooLong or QueueFull. `live_count` sequences run or wait."""
        assert len(request.prompt_token_ids) > 0, "an empty prompt is refused at the edge"
        assert request.stop.max_tokens >= 1, "max_tokens is checked at the edge"
        longest = self._config.max_sequence_token_count - 1
        if len(request.prompt_token_ids) > longest:
            raise RequestTooLong(
                f"the prompt has {len(request.prompt_token_ids)} tokens; at most {longest} leave "
                f"room for one generated token"
            )
        if request.resumed is not None:
            total = len(request.prompt_token_ids) + len(request.resumed.token_ids)
            if total > longest:
                raise RequestTooLong(
                    f"prompt and output have {total} tokens already; at most {longest} leave room "
                    f"for one more"
                )
        if live_count >= self._config.max_live_count:
            raise QueueFull(
                f"{live_count} requests run or wait, no more are accepted",
                self.retry_after(request.arrival),
            )

    def token_limit(self, prompt_count: int, max_tokens: int) -> int:
        """Total tokens at which a sequence ends, prompt included."""
        return min(prompt_count + max_tokens, self._config.max_sequence_token_count)

    def note_start(self, now: float) -> None:
        """A place in the queue has become free."""
        self._starts.append(now)

    def retry_after(self, now: float) -> float:
        """Seconds until a place in the queue should be free, from the pace of the last starts.

        The time since the last start counts too, so a queue that has come to a halt says so.
        """
        if not self._starts or now <= self._starts[0]:
            return _LEAST_RETRY_SECONDS
        seconds_per_start = (now - self._starts[0]) / len(self._starts)
        return min(max(seconds_per_start, _LEAST_RETRY_SECONDS), _MAX_RETRY_SECONDS)
