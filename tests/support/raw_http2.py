"""HTTP/2 by hand: what gRPC's own client never sends, e.g. pings at any pace and half a call.

Knows frames and nothing else: what a peer answers comes back as frames.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
ENHANCE_YOUR_CALM = 0xB


@dataclass(frozen=True)
class Frame:
    """One frame as it came."""

    kind: int
    flags: int
    stream: int
    payload: bytes

    @property
    def error_code(self) -> int:
        """Of a GOAWAY."""
        assert self.kind == GOAWAY
        return int.from_bytes(self.payload[4:8])


class RawConnection:
    """One connection, its settings exchanged."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._next_stream = 1

    async def send(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        head = len(payload).to_bytes(3) + bytes((kind, flags)) + stream.to_bytes(4)
        self._writer.write(head + payload)
        await self._writer.drain()

    async def open_call(self, path: str, *headers: tuple[str, str]) -> int:
        """Sends a call's headers and returns its stream; the message is left to `message`."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        fields = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", path),
            (":authority", "localhost"),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            *headers,
        )
        block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields)
        await self.send(HEADERS, END_HEADERS, stream, block)
        return stream

    async def message(self, stream: int, content: bytes) -> None:
        """Sends a call's message and ends the client's side."""
        await self.send(DATA, END_STREAM, stream, b"\x00" + len(content).to_bytes(4) + content)

    async def frame(self) -> Frame | None:
        """The next frame but for settings, which are acknowledged; None at the end."""
        while True:
            try:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
            except (asyncio.IncompleteReadError, ConnectionError):
                return None
            frame = Frame(head[3], head[4], int.from_bytes(head[5:9]), payload)
            if frame.kind == SETTINGS and not frame.flags & ACK:
                await self.send(SETTINGS, ACK, 0)
            elif frame.kind not in (SETTINGS, WINDOW_UPDATE):
                return frame

    async def ping(self) -> Frame | None:
        """Pings, and returns the next frame that is a pong or says goodbye; None at the end."""
        await self.send(PING, 0, 0, b"01234567")
        while (frame := await self.frame()) is not None:
            if frame.kind == GOAWAY or (frame.kind == PING and frame.flags & ACK):
                return frame
        return None


def _text(value: str) -> bytes:
    data = value.encode()
    assert len(data) < 127
    return bytes((len(data),)) + data


@asynccontextmanager
async def raw_connection(port: int) -> AsyncIterator[RawConnection]:
    """A connection to a server on loopback."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        connection = RawConnection(reader, writer)
        await connection.send(SETTINGS, 0, 0)
        yield connection
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
