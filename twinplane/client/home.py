"""Where an asyncio client can be used: in one event loop of one process.

gRPC's own words for a second loop are "Event loop is closed", and a forked child hangs.
"""

from __future__ import annotations

import asyncio
import os

from twinplane.errors import ClientUnusable


class Home:
    """The event loop and the process in which a client or a generation can be used."""

    def __init__(self, loop: asyncio.AbstractEventLoop, process_id: int) -> None:
        self._loop = loop
        self._process_id = process_id

    @classmethod
    def here(cls) -> Home:
        """The running loop and this process. Raises ClientUnusable outside of a loop."""
        try:
            return cls(asyncio.get_running_loop(), os.getpid())
        except RuntimeError:
            raise ClientUnusable("AsyncClient is used within an event loop; none runs") from None

    def is_here(self) -> bool:
        """Whether this is the same loop and process."""
        try:
            here = Home.here()
        except ClientUnusable:
            return False
        return here._loop is self._loop and here._process_id == self._process_id

    def require(self) -> None:
        """Raises ClientUnusable unless this is the same loop and process."""
        if Home.here()._process_id != self._process_id:
            raise ClientUnusable(
                "the client was made before this process was forked: make another one, in a process"
                " that was spawned"
            )
        if not self.is_here():
            raise ClientUnusable(
                "the client belongs to another event loop: make one in each, e.g. within the"
                " function that asyncio.run is given"
            )
