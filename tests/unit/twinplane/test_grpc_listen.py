"""Where a server listens: what is in the way is replaced, or named."""

from __future__ import annotations

import os
import re
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


async def test_a_socket_that_is_too_busy_to_answer_stays(tmp_path: Path) -> None:
    path = tmp_path / "busy.sock"
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen()
        async with made() as server:
            with pytest.raises(CannotListen, match="another process"):
                listen(server, "unused", 0, path)
    assert path.is_socket()


@pytest.mark.parametrize("name", ["a b.sock", "ü.sock", "日本.sock", "a:b.sock", "a[b].sock", "~"])
async def test_a_path_may_have_any_letter(tmp_path: Path, name: str) -> None:
    (tmp_path / "real folder").mkdir()
    (tmp_path / "link").symlink_to("real folder")
    async with made() as server:
        address = listen(server, "unused", 0, tmp_path / "link" / name)
        await server.start()
        assert (tmp_path / "real folder" / name).is_socket()
        assert await is_reached(address)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing/a.sock", "no folder"),
        ("file/a.sock", "Not a directory|no folder"),
        ("x" * 200, "at most 107 bytes"),
        ("ü" * 60, "at most 107 bytes"),
        ("a%41.sock", "can't name a socket with %"),
        ("a#b?.sock", "can't name a socket with # \\?"),
        ("a,b", "can't name a socket with ,"),
        ("nowhere", "a link to nowhere"),
        (".", "is no socket"),
    ],
)
async def test_what_is_in_the_way_of_a_socket_is_named(
    tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    async with made() as server:
        with pytest.raises(CannotListen, match=reason) as refused:
            listen(server, "unused", 0, tmp_path / name)
    assert "\n" not in str(refused.value)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
async def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)  # noqa: ASYNC240
    async with made() as server:
        with pytest.raises(CannotListen, match=f"no permission to write to {tmp_path}"):
            listen(server, "unused", 0, tmp_path / "a.sock")


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("192.0.2.1", "Cannot assign requested address"),  # reserved for documentation
        ("no-such-host.invalid", "not known|failure|No address"),
        ("x" * 300, "."),
        ("a b", "."),
    ],
)
async def test_a_host_that_is_not_ours_is_said_with_its_reason(host: str, reason: str) -> None:
    async with made() as server:
        with pytest.raises(CannotListen, match=re.escape(host)) as refused:
            listen(server, host, 0, None)
    assert re.search(reason, str(refused.value).removeprefix(f"can't listen on {host}"))
    assert "another process" not in str(refused.value)
