"""What is still read of a client's stream that was refused before its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_SECONDS = 2.0


async def read_out(requests: AsyncIterator[object]) -> None:
    """Reads a refused stream on to its end, for a while. A Python client that still writes when
    its call ends takes that for an INTERNAL error, and never sees the status."""
    # Whatever is wrong with what comes: the call is refused already.
    with contextlib.suppress(Exception):
        async with asyncio.timeout(_SECONDS):
            async for _ in requests:
                pass
