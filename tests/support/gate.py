"""A clock that stands still until a test lets it go: decides how long text work takes."""

from __future__ import annotations

import asyncio
import threading


class Gate:
    """Chat templates ask their clock at every operation, and wait here."""

    def __init__(self) -> None:
        self._entered = threading.Semaphore(0)
        self._open = threading.Event()

    def __call__(self) -> float:
        self._entered.release()
        assert self._open.wait(60)
        return 0.0

    def open(self) -> None:
        """Nobody waits any more."""
        self._open.set()

    async def wait_entered(self) -> None:
        """Until a template has begun to render."""
        assert await asyncio.to_thread(self._entered.acquire, timeout=60)
