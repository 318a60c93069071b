"""Where a server listens: what is in the way is replaced, or named."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from twinplane.grpc.listen import CannotListen, listen
from twinplane.grpc.options import SERVER_OPTIONS


@asynccontextmanager
async def made() -> AsyncIterator[grpc.aio.Server]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    try:
        yield server
    finally:
        await server.stop(0.0)


async def is_reached(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            await channel.unary_unary("/any/Method")(b"", timeout=10.0)
        except grpc.aio.AioRpcError as error:
            return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return False


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_the_address_names_the_real_port(host: str) -> None:
    async with made() as server:
        try:
            address = listen(server, host, 0, None)
        except CannotListen:
            assert host == "::1", "a machine without IPv6"
            return
        await server.start()
        assert await is_reached(address)


async def test_a_taken_port_is_said_at_once() -> None:
    async with made() as server, made() as second:
        address = listen(server, "127.0.0.1", 0, None)
        await server.start()
        with pytest.raises(CannotListen, match=address):
            listen(second, "127.0.0.1", int(address.rpartition(":")[2]), None)


async def test_a_unix_socket_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "server.sock"
    async with made() as server, made() as second:
        address = listen(server, "unused", 0, path)
        assert path.stat().st_mode & 0o777 == 0o600
        await server.start()
        with pytest.raises(CannotListen, match="another process"):
            listen(second, "unused", 0, path)
        assert await is_reached(address), "the first is still there"


async def test_a_dead_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(path))
    async with made() as server:
        address = listen(server, "unused", 0, path)
        await server.start()
        assert await is_reached(address)


async def test_a_file_that_is_no_socket_stays(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    async with made() as server:
        with pytest.raises(CannotListen, match=f"{path}.*no socket"):
            listen(server, "unused", 0, path)
    assert path.read_text() == "precious"
