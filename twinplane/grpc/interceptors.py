"""The one place where errors of our RPCs become statuses, are counted, and are logged."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from contextvars import ContextVar
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

import grpc

from twinplane.grpc.status import Status, abort, internal_status
from twinplane.process.logs import fields

# Set by a servicer whose call has a name; each call has a context of its own.
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")

_OUR_METHODS = "/twinplane."

_logger = logging.getLogger(__name__)

_Context = grpc.aio.ServicerContext[Any, Any]
# Takes a message or a stream of messages; returns a message, or nothing once it has streamed.
_Behaviour = Callable[[Any, _Context], Awaitable[Any]]

_HANDLERS = {
    # by whether requests, and whether responses, are streams
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps Twinplane's RPCs of all four kinds, so that a servicer raises its errors as they are.
    Health and reflection pass through.

    `status_of` is the plane's table from its errors to statuses, None for one that it does not
    expect. `on_call` is told each call's method and status code when the call ends.

    An unexpected error is a bug of ours, and becomes INTERNAL. `new_error_id` names it: the client
    gets the id; the log gets the id, the call's REQUEST_ID and where the error was raised. Neither
    gets the error's text, which could quote a prompt.
    """

    def __init__(
        self,
        status_of: Callable[[Exception], Status | None],
        on_call: Callable[[str, str], None],
        new_error_id: Callable[[], str],
    ) -> None:
        self._status_of = status_of
        self._on_call = on_call
        self._new_error_id = new_error_id

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OUR_METHODS):
            return handler
        kind, make = _HANDLERS[handler.request_streaming, handler.response_streaming]
        behaviour = getattr(handler, kind)
        if isasyncgenfunction(behaviour):
            behaviour = _written(behaviour)
        elif not iscoroutinefunction(behaviour):
            return handler  # a generated stub, which answers UNIMPLEMENTED
        return make(
            self._guard(method, behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guard(self, method: str, behaviour: _Behaviour) -> _Behaviour:
        async def guarded(request: Any, context: _Context) -> Any:
            code = grpc.StatusCode.OK
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                code = _cancellation_code(context)
                raise
            except Exception as error:
                # The boundary: an error of a servicer ends its call with a status, nothing else.
                status = self._status_of(error) or internal_status(self._log(method, error))
                code = status.code
                await abort(context, status)
            finally:
                self._on_call(method, code.name)

        return guarded

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


def _written(generator: Callable[[Any, _Context], Any]) -> _Behaviour:
    """A servicer's async generator as a coroutine that writes what is generated."""

    async def write_all(request: Any, context: _Context) -> None:
        async with aclosing(generator(request, context)) as responses:
            async for response in responses:
                await context.write(response)

    return write_all


def _cancellation_code(context: _Context) -> grpc.StatusCode:
    remaining = context.time_remaining()
    if remaining is not None and remaining <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED
