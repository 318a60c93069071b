"""TCP connections that a test can cut, as a network does: without a word to either end."""

from __future__ import annotations

import asyncio
from typing import Self


class Wire:
    """Forwards a port of its own to another on loopback, until cut."""

    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._server: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """Where to connect."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def reset(self) -> None:
        """Resets every connection that is open."""
        writers, self._writers = self._writers, []
        for writer in writers:
            writer.transport.abort()

    def cut(self) -> None:
        """Resets every connection, and accepts no more."""
        assert self._server is not None
        self._server.close()
        self.reset()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        self._writers += [writer, far_writer]
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._tasks.add(asyncio.create_task(self._forward(source, target)))

    async def _forward(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                target.write(data)
                await target.drain()
        except ConnectionError:
            pass  # cut
