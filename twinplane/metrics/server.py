"""A small HTTP/1.1 endpoint for /metrics and the probes, on the event loop.

It serves GET and HEAD, one request per connection, and bounds what a peer can hold: the size of the
request's head, the time of a connection, and the number of connections. Beyond that number the
oldest connection makes room: those who say nothing, half of something or read slowly never keep a
probe from its answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

_MAX_HEAD_BYTES = 8192
_CONNECTION_SECONDS = 10.0
_MAX_CONNECTIONS = 32


class CannotServeMetrics(Exception):
    """The endpoint's address can't be listened on; the message says why."""


async def _nothing() -> None:
    pass


class MetricsServer:
    """Answers scrapes and probes.

    `render` gives /metrics its body, in text format 0.0.4; `refresh` is awaited before, and must
    not take long. `ready` decides /readyz, and /healthz, its other name. /livez is OK for as long
    as the process answers.
    """

    def __init__(
        self,
        render: Callable[[], bytes],
        ready: Callable[[], bool],
        refresh: Callable[[], Awaitable[None]] = _nothing,
    ) -> None:
        self._render = render
        self._ready = ready
        self._refresh = refresh
        self._server: asyncio.Server | None = None
        # In the order of their arrival.
        self._connections: dict[asyncio.Task[None], None] = {}

    async def start(self, host: str, port: int) -> int:
        """Listens, and returns the port (port 0: any free one). Raises CannotServeMetrics."""
        try:
            self._server = await asyncio.start_server(
                self._serve,
                host,
                port,
                limit=_MAX_HEAD_BYTES,
                reuse_address=True,
                backlog=_MAX_CONNECTIONS * 4,
            )
        except (OSError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CannotServeMetrics(f"can't serve metrics on {host}:{port}: {reason}") from error
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def close(self) -> None:
        """Stops listening and ends the connections that are open. Idempotent."""
        if self._server is None:
            return
        self._server.close()
        for task in self._connections:
            task.cancel()
        if self._connections:
            await asyncio.wait(self._connections)
        await self._server.wait_closed()
        self._server = None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = None
        if len(self._connections) > _MAX_CONNECTIONS:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.cancel()
        try:
            async with asyncio.timeout(_CONNECTION_SECONDS):
                writer.write(await self._answer(reader))
                writer.close()
                await writer.wait_closed()
        except (OSError, TimeoutError):
            pass  # the peer is gone or too slow; nobody is left to tell
        finally:
            # Whatever is still to be sent is not worth the memory.
            writer.transport.abort()
            self._connections.pop(task, None)

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            raise ConnectionResetError from None
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        parts = head.split(b"\r\n", 1)[0].split(b" ")
        if len(parts) != 3 or not parts[2].startswith(b"HTTP/1."):
            return _response(HTTPStatus.BAD_REQUEST)
        method, target, _ = parts
        if method not in (b"GET", b"HEAD"):
            return _response(HTTPStatus.METHOD_NOT_ALLOWED)
        match target.split(b"?", 1)[0]:
            case b"/metrics":
                await self._refresh()
                response = _response(HTTPStatus.OK, self._render(), CONTENT_TYPE_PLAIN_0_0_4)
            case b"/livez":
                response = _response(HTTPStatus.OK)
            case b"/readyz" | b"/healthz":
                ready = self._ready()
                response = _response(HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)
            case _:
                response = _response(HTTPStatus.NOT_FOUND)
        if method == b"HEAD":
            return response.split(b"\r\n\r\n", 1)[0] + b"\r\n\r\n"
        return response


def _response(
    status: HTTPStatus, body: bytes | None = None, content_type: str = "text/plain; charset=utf-8"
) -> bytes:
    body = f"{status.phrase}\n".encode() if body is None else body
    head = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\n"
        f"Content-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + body
