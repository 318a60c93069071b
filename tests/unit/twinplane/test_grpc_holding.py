"""What a server holds of its calls' messages, for how long, and what a deadline counts as."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import grpc
import pytest

from tests.simulation.rig import until
from tests.support.raw_http2 import raw_connection
from tests.support.small_server import STREAM, small_server
from twinplane.grpc.interceptors import CallEnd, DeadlinePassed, StatusInterceptor, require_time
from twinplane.grpc.receiving import Receiver
from twinplane.grpc.status import Status, read

PATIENCE = 60.0
REFUSED = Status(grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", "too old")


class Message:
    """A message as far as it matters here: whether anybody holds it."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw


class Calls:
    """What is told of calls, and the messages that are still held."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.messages: weakref.WeakSet[Message] = weakref.WeakSet()

    def on_call(self, end: CallEnd) -> None:
        self.codes.append(end.code)

    def deserialize(self, raw: bytes) -> Message:
        message = Message(raw)
        self.messages.add(message)
        return message

    async def counted(self, count: int = 1) -> None:
        """Until that many calls have ended."""
        async with asyncio.timeout(PATIENCE):
            await until(lambda: len(self.codes) >= count)


@asynccontextmanager
async def served(
    behaviour: Any, receiver: Receiver | None = None, max_message_bytes: int = 1 << 20
) -> AsyncIterator[tuple[Calls, int, Any]]:
    """Serves `behaviour`; yields its calls, the port, and the method for clients."""
    calls = Calls()
    interceptor = StatusInterceptor(
        lambda error: REFUSED if isinstance(error, LookupError) else None,
        calls.on_call,
        lambda: "error-1",
        receiver=receiver,
        max_message_bytes=max_message_bytes,
    )
    async with (
        small_server(behaviour, interceptor=interceptor, deserializer=calls.deserialize) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield calls, port, channel.unary_stream(STREAM)


@pytest.fixture
def no_collector() -> Any:
    """What only the garbage collector would find is held."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_a_servicer_that_lets_go_of_a_message_was_the_last_to_hold_it(
    no_collector: None,
) -> None:
    let = asyncio.Event()

    async def behaviour(message: Message, context: Any) -> None:
        del message
        await context.write(b"started")
        await let.wait()

    async with served(behaviour) as (calls, _, method):
        call = method(b"large")
        assert await call.read() == b"started"
        assert not calls.messages
        let.set()
        assert await call.read() is grpc.aio.EOF


@pytest.mark.parametrize("error", [LookupError, RuntimeError], ids=["refused", "a bug"])
async def test_an_error_is_not_kept_and_no_message_with_it(
    no_collector: None, error: type[Exception]
) -> None:
    async def behaviour(message: Message, context: Any) -> None:
        raise error(message.raw)

    async with served(behaviour) as (calls, _, method):
        for count in range(1, 11):
            with pytest.raises(grpc.aio.AioRpcError):
                await method(b"large").read()
            await calls.counted(count)
        async with asyncio.timeout(PATIENCE):
            await until(lambda: not calls.messages)


async def test_a_packed_message_is_unpacked_here_and_no_further_than_a_message_may_be() -> None:
    async def behaviour(message: Message, context: Any) -> None:
        await context.write(str(len(message.raw)).encode())

    async with served(behaviour) as (calls, _, method):
        for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
            fits = method(bytes(1 << 20), compression=compression)
            assert await fits.read() == b"1048576"
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await method(bytes((1 << 20) + 1), compression=compression).read()
            status = read(error.value)
            assert (status.code, status.reason) == (
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "MESSAGE_TOO_LARGE",
            )
            assert status.retry_after is None, "waiting does not help"
    assert calls.codes == ["OK", "RESOURCE_EXHAUSTED"] * 2


async def echo(message: Message, context: Any) -> None:
    await context.write(message.raw)


async def test_one_connections_half_calls_do_not_stop_another_connection() -> None:
    receiver = Receiver(per_connection=2, in_all=4, patience=PATIENCE, contended=0.1)
    async with served(echo, receiver) as (calls, port, method), raw_connection(port) as raw:
        streams = [await raw.open_call(STREAM) for _ in range(10)]
        await raw.ping()
        assert await asyncio.wait_for(method(b"whole").read(), PATIENCE) == b"whole"
        assert calls.codes == ["OK"], "and nobody was hurried"
        for stream in streams:
            await raw.message(stream, b"late")
        await calls.counted(11)
        assert set(calls.codes) == {"OK"}


async def test_half_calls_of_many_connections_are_hurried_when_others_wait() -> None:
    receiver = Receiver(per_connection=2, in_all=4, patience=PATIENCE, contended=0.1)
    async with (
        served(echo, receiver) as (calls, port, method),
        raw_connection(port) as first,
        raw_connection(port) as second,
        raw_connection(port) as third,
    ):
        for raw in (first, second, third):
            for _ in range(2):
                await raw.open_call(STREAM)
            await raw.ping()
        assert await asyncio.wait_for(method(b"whole").read(), PATIENCE) == b"whole"
        await calls.counted(3)
        assert sorted(calls.codes)[:2] == ["INVALID_ARGUMENT"] * 2
        assert calls.codes.count("OK") == 1
    assert not receiver._peers and not receiver._unhurried


async def test_a_message_that_does_not_come_in_time_is_no_message() -> None:
    async with (
        served(echo, Receiver(patience=0.1)) as (calls, port, _),
        raw_connection(port) as raw,
    ):
        await raw.open_call(STREAM)
        await calls.counted()
        assert calls.codes == ["INVALID_ARGUMENT"]


async def test_calls_that_leave_while_they_wait_for_their_turn_leave_nothing() -> None:
    receiver = Receiver(per_connection=1, in_all=1, patience=PATIENCE)
    async with served(echo, receiver) as (calls, port, method):
        async with raw_connection(port) as raw:
            for _ in range(20):
                await raw.open_call(STREAM)
            await raw.ping()
        await calls.counted(20)
        assert set(calls.codes) == {"CANCELLED"}
        assert await method(b"whole").read() == b"whole"
        await calls.counted(21)
        assert not receiver._peers and not receiver._unhurried


TIMEOUTS = [1.001, 1.003, 1.005] * 8
"""Each travels as 1.01 seconds."""


async def test_an_expired_deadline_counts_as_that() -> None:
    """A deadline travels rounded up, so the client's reset comes before the server's own."""

    async def behaviour(message: Message, context: Any) -> None:
        await asyncio.sleep(PATIENCE)

    async with served(behaviour) as (calls, _, method):

        async def expire(seconds: float) -> None:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await method(b"", timeout=seconds).read()
            assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED

        await asyncio.gather(*map(expire, TIMEOUTS))
        await calls.counted(len(TIMEOUTS))
    # A busy machine may take some milliseconds too many to read a call's headers.
    assert calls.codes.count("DEADLINE_EXCEEDED") > len(TIMEOUTS) // 2


async def test_a_cancel_long_before_the_deadline_is_a_cancel() -> None:
    entered = asyncio.Event()

    async def behaviour(message: Message, context: Any) -> None:
        entered.set()
        await asyncio.sleep(PATIENCE)

    async with served(behaviour) as (calls, _, method):
        call = method(b"", timeout=PATIENCE)
        await asyncio.wait_for(entered.wait(), PATIENCE)
        call.cancel()
        await calls.counted()
    assert calls.codes == ["CANCELLED"]


async def test_what_comes_after_its_deadline_is_not_done() -> None:
    done: list[bytes] = []

    async def behaviour(message: Message, context: Any) -> None:
        done.append(message.raw)

    async with served(behaviour) as (calls, port, method), raw_connection(port) as raw:
        stream = await raw.open_call(STREAM, ("grpc-timeout", "100m"))
        await calls.counted()
        await raw.message(stream, b"late")
        await method(b"in time", timeout=PATIENCE).read()
        await calls.counted(2)
    assert calls.codes == ["DEADLINE_EXCEEDED", "OK"]
    assert done == [b"in time"]


@pytest.mark.parametrize(("remaining", "passed"), [(0.0, True), (0.001, False), (None, False)])
def test_a_servicer_asks_whether_there_is_time_left(remaining: float | None, passed: bool) -> None:
    class Context:
        def time_remaining(self) -> float | None:
            return remaining

    with pytest.raises(DeadlinePassed) if passed else nullcontext():
        require_time(Context())  # type: ignore[arg-type]
