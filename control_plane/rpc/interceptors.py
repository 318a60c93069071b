"""The one place where errors of our own RPCs become statuses, are counted, and are logged."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import Message

from control_plane.rpc.errors import status_of
from twinplane.grpc.status import abort, internal_status
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

_OUR_METHODS = "/twinplane."

Context = grpc.aio.ServicerContext[Message, Message]
Behaviour = Callable[[Message, Context], Awaitable[Message | None]]


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Wraps Twinplane's RPCs; health and reflection pass through.

    `on_call` is told each call's method and status code. `new_error_id` names errors that nobody
    expected: the client gets the id, the log gets the id, the request's name and where it happened.
    Neither gets the error's text, which could quote a prompt.
    """

    def __init__(
        self, on_call: Callable[[str, str], None], new_error_id: Callable[[], str]
    ) -> None:
        self._on_call = on_call
        self._new_error_id = new_error_id

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or not method.startswith(_OUR_METHODS):
            return handler
        assert not handler.request_streaming, "streams from clients need a wrapper of their own"
        if handler.response_streaming:
            make, behaviour = grpc.unary_stream_rpc_method_handler, handler.unary_stream
        else:
            make, behaviour = grpc.unary_unary_rpc_method_handler, handler.unary_unary
        return make(
            self._guard(method, behaviour),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )

    def _guard(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def guarded(request: Message, context: Context) -> Message | None:
            code = grpc.StatusCode.OK
            try:
                return await behaviour(request, context)
            except asyncio.CancelledError:
                code = _cancellation_code(context)
                raise
            except Exception as error:
                # The boundary: whatever a handler raises ends its call with a status, no more.
                status = status_of(error) or internal_status(self._log(method, request, error))
                code = status.code
                await abort(context, status)
            finally:
                self._on_call(method, code.name)

        return guarded

    def _log(self, method: str, request: Message, error: Exception) -> str:
        error_id = self._new_error_id()
        frames = traceback.extract_tb(error.__traceback__)
        _logger.error(
            "unexpected error in an rpc",
            extra=fields(
                error_id=error_id,
                method=method,
                request_id=getattr(request, "request_id", ""),
                error_type=type(error).__qualname__,
                where=" < ".join(
                    f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)
                ),
            ),
        )
        return error_id


def _cancellation_code(context: Context) -> grpc.StatusCode:
    remaining = context.time_remaining()
    if remaining is not None and remaining <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED
