"""Connections that say nothing, half of something or read nothing never silence a probe."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from tests.support.quick import spread
from twinplane.metrics.server import MetricsServer
from twinplane.process.event_loop import new_event_loop

SECONDS = 20.0
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "the planes'": new_event_loop,
}
BIG = b"# " + b"x" * 500_000 + b"\n"
HALVES: dict[str, bytes] = {
    "nothing": b"",
    "a letter": b"G",
    "half a line": b"GET /healthz HT",
    "a line": b"GET /healthz HTTP/1.1\r\n",
    "a head without its end": b"GET /metrics HTTP/1.1\r\nHost: x\r\n",
    "a head's last byte missing": b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r",
    "nearly too long": b"GET /metrics HTTP/1.1\r\nX: " + b"y" * 8000,
    "no HTTP": b"\x16\x03\x01\x02\x00",
    "a whole request whose answer is not read": b"GET /metrics HTTP/1.1\r\n\r\n",
}


@asynccontextmanager
async def serving() -> AsyncIterator[int]:
    server = MetricsServer(lambda: BIG, lambda: True)
    port = await server.start("127.0.0.1", 0)
    try:
        yield port
    finally:
        await server.close()


async def status(port: int, target: str = "/healthz") -> bytes:
    async with asyncio.timeout(SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        return answer.split(b" ")[1]


async def crowd(port: int, count: int, message: bytes) -> list[socket.socket]:
    """Connections that have sent `message`, and read nothing."""
    loop = asyncio.get_running_loop()
    peers = []
    for _ in range(count):
        peer = socket.socket()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        peer.setblocking(False)
        await loop.sock_connect(peer, ("127.0.0.1", port))
        with suppress(ConnectionError):  # it may have had to make room already
            await loop.sock_sendall(peer, message)
        peers.append(peer)
    return peers


async def count_open(peers: list[socket.socket]) -> int:
    """Those that the server has not ended."""
    count = 0
    for peer in peers:
        try:
            while peer.recv(1 << 16):
                pass
        except BlockingIOError:
            count += 1
        except ConnectionError:
            pass
    return count


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("count", [32, 40, 150])
@pytest.mark.parametrize("kind", spread(HALVES, 3))
def test_a_probe_is_answered_whoever_else_is_connected(kind: str, count: int, loop: str) -> None:
    async def check() -> None:
        async with serving() as port:
            peers = await crowd(port, count, HALVES[kind])
            assert await status(port) == b"200"
            assert await asyncio.gather(*(status(port) for _ in range(8))) == [b"200"] * 8
            assert await status(port, "/nothing") == b"404"
            for peer in peers:
                peer.close()

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(check())


@pytest.mark.parametrize("kind", ["nothing", "a line", "a whole request whose answer is not read"])
def test_a_flood_is_bounded(kind: str) -> None:
    async def check() -> None:
        async with serving() as port:
            peers = await crowd(port, 200, HALVES[kind])
            assert await status(port) == b"200"
            async with asyncio.timeout(SECONDS):
                while await count_open(peers) > 32:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            for peer in peers:
                peer.close()

    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(check())
