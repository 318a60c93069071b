"""How many lines a second somebody may cause who is not trusted to cause few.

Whoever can send requests can send such that cost nothing and end at once. Each of them is counted
in the metrics; the log gets so many lines of them as a person can read, and the number of the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_SECONDS = 1.0


class LineQuota:
    """At most `most` lines in each second; `tell` is called with the number of those left out.

    Used on one event loop, which calls `tell` when the second is over.
    """

    def __init__(self, most: int, tell: Callable[[int], None]) -> None:
        self._most = most
        self._tell = tell
        self._count = 0
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> bool:
        """Whether one more line may be written."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_SECONDS, self.end_second)
        self._count += 1
        return self._count <= self._most

    def end_second(self) -> None:
        """Tells what was left out so far, and starts anew."""
        if self._timer is not None:
            self._timer.cancel()
        left_out, self._count, self._timer = max(0, self._count - self._most), 0, None
        if left_out:
            self._tell(left_out)
