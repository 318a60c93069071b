"""The one place where errors of our RPCs become statuses, are counted, and are logged.

It also receives the messages of calls, see receiving.py and messages.py: so that a call can be
refused before its message is received or looked at, and so that nothing but the servicer holds a
message once it has it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any, Protocol

import grpc

from twinplane.grpc.messages import MalformedMessage, MessageError, parse, unpacked
from twinplane.grpc.receiving import Receiver
from twinplane.grpc.status import (
    Status,
    abort,
    deadline_status,
    internal_status,
    message_status,
)
from twinplane.process.line_quota import LineQuota
from twinplane.process.logs import fields

# Set by a servicer whose call has a name; each call has a context of its own.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

DEFAULT_MESSAGE_BYTES = 4 * 1024 * 1024

# What the call in whose context this is has to do to leave the door.
_LEAVE: ContextVar[Callable[[], None]] = ContextVar("leave")

# The seconds that the call in whose context this is had until its deadline when it came.
_ALLOWED: ContextVar[float | None] = ContextVar("allowed", default=None)

_OUR_METHODS = "/twinplane."
# A deadline travels as a number of at most a few digits, rounded up: the server's may be later.
_DEADLINE_ROUNDING = 0.01
_DEADLINE_TRAVEL_SECONDS = 0.05

_MALFORMED = "a message was malformed"
MALFORMED_LINES = 20
"""In a second: whoever sends such sends many. What is beyond is told by number."""

_logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
# Takes a message or a stream of messages; returns a message, or nothing once it has streamed.
_Behaviour = Callable[[Any, _Context], Awaitable[Any]]

# By whether responses are streams. To grpc.aio all requests are streams: of those it does not
# receive, parse and hold the message by itself. On the wire there is no difference.
_HANDLERS = {
    False: grpc.stream_unary_rpc_method_handler,
    True: grpc.stream_stream_rpc_method_handler,
}
_BEHAVIOURS = {
    # by whether requests, and whether responses, are streams
    (False, False): "unary_unary",
    (False, True): "unary_stream",
    (True, False): "stream_unary",
    (True, True): "stream_stream",
}


class DeadlinePassed(Exception):
    """The call's deadline has passed: what it asks for is not to be done any more."""


@dataclass(frozen=True, slots=True)
class CallEnd:
    """How a call of ours has ended: the name of its status code, the reason of its error (empty
    where it had none), and the seconds since it came.
    """

    method: str
    code: str
    reason: str
    seconds: float


class Door(Protocol):
    """Decides which calls come in."""

    def check(self, method: str) -> None:
        """A call has come. Raises what refuses it, before its message is received."""
        ...

    def enter(self, method: str, byte_count: int) -> Callable[[], None]:
        """A call's message of so many bytes has come, unpacked, and was not looked at yet.

        Returns what is called once: when the servicer lets go of the message (`leave_door`), or
        when the call ends. Raises what refuses the call.
        """
        ...


class OpenDoor:
    """A door for everybody."""

    def check(self, method: str) -> None:
        """See Door."""

    def enter(self, method: str, byte_count: int) -> Callable[[], None]:
        """See Door."""
        return _nothing


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps RPCs of all four kinds, so that a servicer raises its errors as they are.

    `status_of` is the plane's table from its errors to statuses, None for one that it does not
    expect. `on_call` is told of each call when it ends, in the call's own context. Of health and
    reflection it only receives the messages.

    An unexpected error is a bug of ours, and becomes INTERNAL. `new_error_id` names it: the client
    gets the id; the log gets the id, the call's REQUEST_ID and where the error was raised. Neither
    gets the error's text, which could quote a prompt.

    A message that can't be parsed, or that unpacks to more than `max_message_bytes`, is refused
    with its own status. `door` is asked about Twinplane's calls whose request is no stream.
    """

    def __init__(
        self,
        status_of: Callable[[Exception], Status | None],
        on_call: Callable[[CallEnd], None],
        new_error_id: Callable[[], str],
        *,
        max_message_bytes: int = DEFAULT_MESSAGE_BYTES,
        door: Door | None = None,
        receiver: Receiver | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._status_of = status_of
        self._on_call = on_call
        self._new_error_id = new_error_id
        self._max_message_bytes = max_message_bytes
        self._door = door or OpenDoor()
        self._receiver = receiver or Receiver()
        self._clock = clock
        self._malformed_lines = LineQuota(
            MALFORMED_LINES, lambda count: _logger.info(_MALFORMED, extra=fields(count=count))
        )
        self._wrapped: dict[str, tuple[Any, Any]] = {}
        """By method: a handler, and what stands for it."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._wrapped.get(method)
        if known is None or known[0] is not handler:
            known = self._wrapped[method] = (handler, self._wrap(method, handler))
        return known[1]

    def _wrap(self, method: str, handler: Any) -> Any:
        behaviour = getattr(
            handler, _BEHAVIOURS[handler.request_streaming, handler.response_streaming]
        )
        if isasyncgenfunction(behaviour):
            behaviour = _written(behaviour)
        elif not iscoroutinefunction(behaviour):
            return handler  # a generated stub, which answers UNIMPLEMENTED
        ours = method.startswith(_OUR_METHODS)
        door = self._door if ours else OpenDoor()
        receive = self._from_stream if handler.request_streaming else self._from_one
        behaviour = receive(method, behaviour, handler.request_deserializer, door)
        behaviour = self._guard(method, behaviour) if ours else self._guard_messages(behaviour)
        return _HANDLERS[handler.response_streaming](
            behaviour, response_serializer=handler.response_serializer
        )

    def _from_one(
        self, method: str, behaviour: _Behaviour, deserializer: Any, door: Door
    ) -> _Behaviour:
        async def received(_: Any, context: _Context) -> Any:
            door.check(method)
            raw = unpacked(await self._receiver.receive(context), self._max_message_bytes)
            require_time(context)
            _LEAVE.set(door.enter(method, len(raw)))
            try:
                call = behaviour(parse(raw, deserializer), context)
                del raw
                return await call
            finally:
                leave_door()

        return received

    def _from_stream(
        self, method: str, behaviour: _Behaviour, deserializer: Any, door: Door
    ) -> _Behaviour:
        async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
            async for raw in requests:
                yield parse(unpacked(raw, self._max_message_bytes), deserializer)

        async def received(requests: Any, context: _Context) -> Any:
            return await behaviour(parsed(requests), context)

        return received

    def _guard(self, method: str, behaviour: _Behaviour) -> _Behaviour:
        async def guarded(request: Any, context: _Context) -> Any:
            code, reason, came = grpc.StatusCode.OK, "", self._clock()
            _ALLOWED.set(context.time_remaining())
            try:
                try:
                    return await behaviour(request, context)
                except asyncio.CancelledError:
                    if deadline_passed(context):
                        code, reason = grpc.StatusCode.DEADLINE_EXCEEDED, deadline_status().reason
                    else:
                        code = grpc.StatusCode.CANCELLED
                    raise
                except Exception as error:
                    # The boundary: an error of a servicer ends its call with a status, nothing
                    # else.
                    status = self._status(method, error)
                    code, reason = status.code, status.reason
                # Not above: what ends the call is kept with it, and would keep the error, its
                # traceback, and whatever the frames there hold, e.g. the message.
                return await abort(context, status)
            finally:
                self._on_call(CallEnd(method, code.name, reason, self._clock() - came))

        return guarded

    def _guard_messages(self, behaviour: _Behaviour) -> _Behaviour:
        async def guarded(request: Any, context: _Context) -> Any:
            try:
                return await behaviour(request, context)
            except (MessageError, DeadlinePassed) as error:
                status = _refusal(error) or deadline_status()
            return await abort(context, status)

        return guarded

    def _status(self, method: str, error: Exception) -> Status:
        status = _refusal(error)
        if status is None:
            return self._status_of(error) or internal_status(self._log(method, error))
        if isinstance(error, MalformedMessage) and self._malformed_lines.take():
            _logger.info(_MALFORMED, extra=fields(method=method, error=status.message))
        return status

    def _log(self, method: str, error: Exception) -> str:
        error_id = self._new_error_id()
        frames = traceback.extract_tb(error.__traceback__)
        _logger.error(
            "unexpected error in an rpc",
            extra=fields(
                error_id=error_id,
                method=method,
                request_id=REQUEST_ID.get(),
                error_type=type(error).__qualname__,
                where=" < ".join(
                    f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)
                ),
            ),
        )
        return error_id


def leave_door() -> None:
    """For a servicer that holds nothing of its message any more, long before the call ends.

    What comes after this, up to the next await, finds the place that the call had at the door.
    """
    leave = _LEAVE.get(_nothing)
    _LEAVE.set(_nothing)
    leave()


def require_time(context: _Context) -> None:
    """Raises DeadlinePassed if the call's deadline has passed: nothing needs to be done for it."""
    if context.time_remaining() == 0:
        raise DeadlinePassed


def deadline_passed(context: _Context) -> bool:
    """Whether its deadline is why the call in whose context this is was cancelled.

    A client whose deadline passes resets the call, and that may be here before the server's own
    deadline, which is never earlier.
    """
    remaining, allowed = context.time_remaining(), _ALLOWED.get()
    if remaining is None or allowed is None:
        return False
    slack = _DEADLINE_TRAVEL_SECONDS + _DEADLINE_ROUNDING * allowed
    return remaining <= min(slack, allowed / 2)


def _nothing() -> None:
    pass


def _written(generator: Callable[[Any, _Context], Any]) -> _Behaviour:
    """A servicer's async generator as a coroutine that writes what is generated."""

    async def write_all(request: Any, context: _Context) -> None:
        async with aclosing(generator(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


def _refusal(error: Exception) -> Status | None:
    """The status of what is refused before a servicer sees it; None for other errors."""
    match error:
        case MessageError():
            return message_status(error)
        case DeadlinePassed():
            return deadline_status()
        case _:
            return None
