"""The event loop of both planes."""

from __future__ import annotations

import asyncio


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop where there is one, since it serves more streams per core; otherwise asyncio's."""
    try:
        import uvloop
    except ImportError:  # there is none for this platform
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop
