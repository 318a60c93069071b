"""Connections: what the library obeys of our options, pings, vanished peers, age."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from control_plane.rpc import worker_client
from control_plane.rpc.server import _OPTIONS as CONTROL_OPTIONS
from control_plane.rpc.server import CLIENT_CONNECTIONS
from tests.support.black_hole import black_hole
from tests.support.raw_http2 import ENHANCE_YOUR_CALM, GOAWAY, PING, raw_connection
from tests.support.small_server import CALM, STREAM, small_server
from twinplane.client import channel
from twinplane.grpc.options import (
    LEFT_PACKED,
    SERVER_OPTIONS,
    WORKER_CONNECTION_OPTIONS,
    Connections,
    Keepalive,
    Option,
)
from worker_service.rpc.server import WORKER_CONNECTIONS

PATIENCE = 30.0
QUICK = Keepalive(idle_ms=200, answer_ms=200)
ALL_OPTIONS: dict[str, tuple[Option, ...]] = {
    "control server": (
        *SERVER_OPTIONS,
        LEFT_PACKED,
        *CLIENT_CONNECTIONS.options(),
        *CONTROL_OPTIONS,
    ),
    "worker server": (
        *SERVER_OPTIONS,
        LEFT_PACKED,
        *WORKER_CONNECTIONS.options(),
        *WORKER_CONNECTION_OPTIONS,
    ),
    "the control plane's channel to a worker": worker_client._CHANNEL_OPTIONS,
    "the client's channel": channel.OPTIONS,
}
ROOT = Path(__file__).parents[3]
OPTION_NAME = re.compile(r'"(grpc\.[a-z0-9_.]+)"')


def names_in_the_source() -> list[str]:
    """Every option's name that is written anywhere in the product."""
    sources = (
        path
        for package in ("twinplane", "control_plane", "worker_service")
        for path in (ROOT / package).rglob("*.py")
        if not path.stem.endswith(("_pb2", "_pb2_grpc"))
    )
    return sorted({name for path in sources for name in OPTION_NAME.findall(path.read_text())})


NAMES = names_in_the_source()


@pytest.fixture(scope="module")
def library() -> bytes:
    """The library that is in use, with the names of all options that it reads."""
    return Path(cygrpc.__file__).read_bytes()


def test_the_source_was_searched_for_names() -> None:
    assert set(NAMES) >= {name for options in ALL_OPTIONS.values() for name, _ in options}


@pytest.mark.parametrize("name", NAMES)
def test_the_library_knows_the_options_name(library: bytes, name: str) -> None:
    assert name.encode() + b"\0" in library


def test_the_library_does_not_know_a_name_that_sounds_right(library: bytes) -> None:
    """It is the name of the constant, not of the option: both servers used it once."""
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms" not in library


@pytest.mark.parametrize("options", ALL_OPTIONS.values(), ids=ALL_OPTIONS)
def test_every_end_notices_that_the_other_has_vanished(options: tuple[Option, ...]) -> None:
    values = dict(options)
    assert len(values) == len(options), "an option is given twice"
    assert values["grpc.keepalive_time_ms"] + values["grpc.http2.ping_timeout_ms"] <= 30_000
    assert values["grpc.keepalive_timeout_ms"] == values["grpc.http2.ping_timeout_ms"]


def test_our_clients_notice_soon_and_without_a_call_send_nothing() -> None:
    values = dict(channel.OPTIONS)
    assert values["grpc.keepalive_time_ms"] + values["grpc.http2.ping_timeout_ms"] <= 10_000
    assert "grpc.keepalive_permit_without_calls" not in values


def test_our_own_ends_ping_no_faster_than_their_servers_allow() -> None:
    ours = dict(channel.OPTIONS)["grpc.keepalive_time_ms"]
    assert ours >= CLIENT_CONNECTIONS.peer_ping_ms
    ours = dict(worker_client._CHANNEL_OPTIONS)["grpc.keepalive_time_ms"]
    assert ours >= WORKER_CONNECTIONS.peer_ping_ms
    assert CLIENT_CONNECTIONS.peer_ping_ms <= 10_000, "the pace that many clients have"


class Waiting:
    """A behaviour that answers once it is let, and knows how its calls end."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.let = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.peers: list[str] = []

    async def behaviour(self, request: bytes, context: Any) -> None:
        self.peers.append(context.peer())
        self.called.set()
        if request != b"at once":
            try:
                await self.let.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise
        await context.write(b"first token")


async def test_a_client_that_pings_at_the_allowed_pace_gets_its_first_token() -> None:
    waiting = Waiting()
    allowed = Connections(CALM.keepalive, peer_ping_ms=100)
    async with small_server(waiting.behaviour, allowed) as port, raw_connection(port) as raw:
        stream = await raw.open_call(STREAM)
        await raw.message(stream, b"prompt")
        await asyncio.wait_for(waiting.called.wait(), PATIENCE)
        for _ in range(8):  # the third one would be too many if the option were not obeyed
            await asyncio.sleep(0.1)
            pong = await asyncio.wait_for(raw.ping(), PATIENCE)
            assert pong is not None and pong.kind == PING
        waiting.let.set()
        payloads = b""
        while b"first token" not in payloads:
            frame = await asyncio.wait_for(raw.frame(), PATIENCE)
            assert frame is not None and frame.kind != GOAWAY
            payloads += frame.payload


async def test_a_client_may_ping_without_a_call() -> None:
    allowed = Connections(CALM.keepalive, peer_ping_ms=100)
    async with small_server(Waiting().behaviour, allowed) as port, raw_connection(port) as raw:
        for _ in range(8):
            await asyncio.sleep(0.1)
            pong = await asyncio.wait_for(raw.ping(), PATIENCE)
            assert pong is not None and pong.kind == PING


async def test_a_client_that_pings_without_pause_is_cut_off() -> None:
    waiting = Waiting()
    async with small_server(waiting.behaviour) as port, raw_connection(port) as raw:
        await raw.message(await raw.open_call(STREAM), b"prompt")
        await asyncio.wait_for(waiting.called.wait(), PATIENCE)
        for _ in range(20):
            frame = await asyncio.wait_for(raw.ping(), PATIENCE)
            if frame is None or frame.kind == GOAWAY:
                break
        assert frame is not None and frame.kind == GOAWAY
        assert frame.error_code == ENHANCE_YOUR_CALM
        await asyncio.wait_for(waiting.cancelled.wait(), PATIENCE)


@asynccontextmanager
async def connected(port: int, *options: Option) -> AsyncIterator[Any]:
    """The method on a connection of its own."""
    own = ("grpc.use_local_subchannel_pool", 1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[own, *options]) as channel:
        yield channel.unary_stream(STREAM)


async def test_a_server_notices_that_its_client_has_vanished() -> None:
    waiting = Waiting()
    async with (
        small_server(waiting.behaviour, Connections(QUICK, peer_ping_ms=1_000)) as port,
        black_hole(port) as hole,
        connected(hole.port) as method,
    ):
        call = method(b"prompt")
        await asyncio.wait_for(waiting.called.wait(), PATIENCE)
        hole.swallow()
        # A minute, if only the option were set whose name promises it.
        await asyncio.wait_for(waiting.cancelled.wait(), PATIENCE)
        call.cancel()


async def test_a_client_notices_that_its_server_has_vanished() -> None:
    waiting = Waiting()
    async with (
        small_server(waiting.behaviour) as port,
        black_hole(port) as hole,
        connected(hole.port, *QUICK.options()) as method,
    ):
        call = method(b"prompt")
        await asyncio.wait_for(waiting.called.wait(), PATIENCE)
        hole.swallow()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await asyncio.wait_for(call.read(), PATIENCE)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_peer_that_waits_and_answers_pings_is_kept() -> None:
    waiting = Waiting()
    connections = Connections(QUICK, peer_ping_ms=100)
    async with (
        small_server(waiting.behaviour, connections) as port,
        connected(port, *QUICK.options()) as method,
    ):
        call = method(b"prompt")
        await asyncio.wait_for(waiting.called.wait(), PATIENCE)
        await asyncio.sleep(1.5)  # several pings of both ends
        waiting.let.set()
        assert await asyncio.wait_for(call.read(), PATIENCE) == b"first token"


async def test_an_old_connection_takes_no_new_calls_and_cuts_no_stream() -> None:
    waiting = Waiting()
    connections = Connections(CALM.keepalive, peer_ping_ms=60_000, age_ms=200)
    async with small_server(waiting.behaviour, connections) as port, connected(port) as method:
        call = method(b"prompt")
        await asyncio.wait_for(waiting.called.wait(), PATIENCE)
        async with asyncio.timeout(PATIENCE):
            while len(set(waiting.peers)) < 4:  # each a connection, three of them aged
                assert await method(b"at once").read() == b"first token"
                await asyncio.sleep(0.01)
        assert not waiting.cancelled.is_set()
        waiting.let.set()
        assert await asyncio.wait_for(call.read(), PATIENCE) == b"first token"
        assert await call.code() is grpc.StatusCode.OK
