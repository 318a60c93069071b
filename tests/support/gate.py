"""Text work that takes as long as a test decides."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from control_plane.text.chat_template import ChatMessage, Rendering


class Gate:
    """A chat renderer that waits until the test opens it, and then gives the contents as they are.

    Stands in for the processes that render templates.
    """

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._open = threading.Event()

    def usable(self) -> bool:
        return True

    def render(self, messages: Sequence[ChatMessage]) -> Rendering:
        self._entered.release()
        assert self._open.wait(60)
        return Rendering("".join(turn.content for turn in messages))

    def close(self) -> None:
        self.open()

    def open(self) -> None:
        """Nobody waits any more."""
        self._open.set()

    async def wait_entered(self) -> None:
        """Until a chat has begun to render."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=60)
