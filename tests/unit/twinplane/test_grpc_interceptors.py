"""StatusInterceptor over a real loopback server: all kinds of RPC, and what is said and logged."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from twinplane.grpc.interceptors import REQUEST_ID, CallEnd, StatusInterceptor
from twinplane.grpc.status import Status, read

REFUSED = Status(grpc.StatusCode.FAILED_PRECONDITION, "STALE_EPOCH", "too old", retry_after=1.5)
MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}
KINDS = list(MAKERS)
NAMES = ["unary", "response stream", "request stream", "both streams"]


class Refusal(Exception):
    """What the table below knows."""


@dataclass
class Service(grpc.GenericRpcHandler):
    """Serves one behaviour under each of four methods, named for which sides stream."""

    behaviour: Any
    calls: list[tuple[str, str]] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    error_ids: int = 0
    port: int = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        requests, responses = (side == "1" for side in details.method[-2:])
        return MAKERS[requests, responses](self.behaviour)

    def on_call(self, end: CallEnd) -> None:
        self.calls.append((end.method, end.code))
        self.ended.set()

    async def counted(self) -> list[tuple[str, str]]:
        """The calls that have ended, once one has."""
        await asyncio.wait_for(self.ended.wait(), 60)
        return self.calls

    def new_error_id(self) -> str:
        self.error_ids += 1
        return f"error-{self.error_ids}"


@asynccontextmanager
async def served(behaviour: Any) -> AsyncIterator[tuple[Service, grpc.aio.Channel]]:
    service = Service(behaviour)
    interceptor = StatusInterceptor(
        lambda error: REFUSED if isinstance(error, Refusal) else None,
        service.on_call,
        service.new_error_id,
    )
    server = grpc.aio.server(interceptors=[interceptor])
    server.add_generic_rpc_handlers((service,))
    service.port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{service.port}") as channel:
            yield service, channel
    finally:
        await server.stop(0)


def method_of(kind: tuple[bool, bool], package: str = "twinplane.test") -> str:
    return f"/{package}.Service/Method{kind[0]:d}{kind[1]:d}"


async def call(
    channel: grpc.aio.Channel,
    kind: tuple[bool, bool],
    request: bytes = b"a",
    package: str = "twinplane.test",
) -> tuple[list[bytes], grpc.aio.AioRpcError | None]:
    """The responses to one request, and the error that followed them."""
    sides = ["stream" if streams else "unary" for streams in kind]
    multi = getattr(channel, "_".join(sides))(method_of(kind, package))
    made = multi(iter([request]) if kind[0] else request)
    responses: list[bytes] = []
    try:
        if kind[1]:
            while (response := await made.read()) is not grpc.aio.EOF:
                responses.append(response)
        else:
            responses.append(await made)
    except grpc.aio.AioRpcError as error:
        return responses, error
    return responses, None


async def first_of(requests: Any) -> bytes:
    if isinstance(requests, bytes):
        return requests
    async for request in requests:
        return request
    raise AssertionError("no request")


def answering(kind: tuple[bool, bool], error: Exception | None = None) -> Any:
    """Answers with what it was sent, and then raises."""

    async def behaviour(request: Any, context: Any) -> bytes | None:
        message = await first_of(request)
        if kind[1]:
            await context.write(message)
        if error is not None:
            raise error
        return None if kind[1] else message

    return behaviour


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
async def test_calls_pass_through_and_are_counted(kind: tuple[bool, bool]) -> None:
    async with served(answering(kind)) as (service, channel):
        assert await call(channel, kind) == ([b"a"], None)
        assert await service.counted() == [(method_of(kind), "OK")]


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
async def test_an_expected_error_becomes_its_status_behind_what_was_answered(
    kind: tuple[bool, bool],
) -> None:
    async with served(answering(kind, Refusal())) as (service, channel):
        responses, error = await call(channel, kind)
        assert error is not None
        assert responses == ([b"a"] if kind[1] else [])
        assert read(error) == REFUSED
        assert await service.counted() == [(method_of(kind), "FAILED_PRECONDITION")]


@pytest.mark.parametrize("kind", KINDS, ids=NAMES)
async def test_an_unexpected_error_tells_the_client_an_id_and_the_log_no_text(
    kind: tuple[bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    async with served(answering(kind, KeyError("the secret prompt"))) as (service, channel):
        _, error = await call(channel, kind)
        assert error is not None
        status = read(error)
        assert (status.code, status.reason) == (grpc.StatusCode.INTERNAL, "INTERNAL")
        assert (status.message, status.metadata) == ("internal error", {"error_id": "error-1"})
        assert await service.counted() == [(method_of(kind), "INTERNAL")]
    [record] = caplog.records
    logged = vars(record)["fields"]
    assert (logged["error_id"], logged["error_type"]) == ("error-1", "KeyError")
    assert "test_grpc_interceptors.py" in logged["where"]
    assert "secret" not in f"{vars(record)}"


async def test_an_async_generator_answers_as_a_coroutine_does() -> None:
    closed = asyncio.Event()

    async def behaviour(request: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            yield request
            yield request * 2
            raise Refusal
        finally:
            closed.set()

    async with served(behaviour) as (service, channel):
        responses, error = await call(channel, (False, True))
        assert error is not None
        assert responses == [b"a", b"aa"]
        assert read(error) == REFUSED
        assert await service.counted() == [(method_of((False, True)), "FAILED_PRECONDITION")]
        assert closed.is_set()


async def test_what_a_servicer_does_not_implement_stays_unimplemented() -> None:
    def stub(request: bytes, context: Any) -> bytes:  # as protoc generates it
        context.set_code(grpc.StatusCode.UNIMPLEMENTED)
        raise NotImplementedError

    async with served(stub) as (service, channel):
        _, error = await call(channel, (False, False))
        assert error is not None
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert not service.error_ids


async def test_other_services_pass_through_uncounted() -> None:
    kind = (False, False)
    async with served(answering(kind)) as (service, channel):
        assert await call(channel, kind, package="grpc.health.v1") == ([b"a"], None)
        assert not service.calls


async def waiting(request: bytes, context: Any) -> bytes:
    await asyncio.Event().wait()
    return request


async def leave(ongoing: Any) -> None:
    ongoing.cancel()


async def outlast(ongoing: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await ongoing


@pytest.mark.parametrize(
    ("seconds", "end", "code"),
    [(None, leave, "CANCELLED"), (0.2, outlast, "DEADLINE_EXCEEDED")],
    ids=["client leaves", "deadline"],
)
async def test_a_call_that_is_cut_short_is_counted_by_why(
    seconds: float | None, end: Callable[[Any], Awaitable[None]], code: str
) -> None:
    entered = asyncio.Event()

    async def behaviour(request: bytes, context: Any) -> bytes:
        entered.set()
        return await waiting(request, context)

    async with served(behaviour) as (service, channel):
        ongoing = channel.unary_unary(method_of((False, False)))(b"a", timeout=seconds)
        await asyncio.wait_for(entered.wait(), 60)
        await end(ongoing)
        assert await service.counted() == [(method_of((False, False)), code)]


async def test_the_log_names_each_call_by_its_own_request_id(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR)
    both = asyncio.Barrier(2)

    async def behaviour(request: bytes, context: Any) -> bytes:
        if request != b"nameless":
            REQUEST_ID.set(request.decode())
            await both.wait()  # both names are set before either call fails
        raise KeyError

    async with served(behaviour) as (_, channel):
        kind = (False, False)
        await asyncio.gather(call(channel, kind, b"one"), call(channel, kind, b"two"))
        await call(channel, kind, b"nameless")
    logged = [vars(record)["fields"]["request_id"] for record in caplog.records]
    assert sorted(logged) == ["", "one", "two"]
