"""A TCP proxy that can turn into a black hole: both sides stay connected, and nothing passes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class BlackHole:
    """`port` is where clients connect."""

    port: int = 0
    _open: asyncio.Event = field(default_factory=asyncio.Event)

    def swallow(self) -> None:
        """From now on nothing passes."""
        self._open.clear()

    def open(self) -> None:
        """What was swallowed passes, and all that follows."""
        self._open.set()

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Passes on what comes, while it is open."""
        try:
            while data := await reader.read(1 << 16):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # the far end has cut it
        finally:
            writer.close()


@asynccontextmanager
async def black_hole(port: int) -> AsyncIterator[BlackHole]:
    """A proxy in front of `port` on loopback; open at first."""
    hole = BlackHole()
    hole._open.set()
    pumps: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            beyond = await asyncio.open_connection("127.0.0.1", port)
        except ConnectionError:
            writer.close()  # nobody is there
            return
        for source, sink in ((reader, beyond[1]), (beyond[0], writer)):
            pump = asyncio.create_task(hole.pump(source, sink))
            pumps.add(pump)
            pump.add_done_callback(pumps.discard)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    hole.port = server.sockets[0].getsockname()[1]
    try:
        yield hole
    finally:
        server.close()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        await asyncio.sleep(0)  # the transports close in the next tick
