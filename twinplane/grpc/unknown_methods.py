"""Calls of RPCs that a server lacks: they are told what it has instead.

So a client that was given a worker's address, or the other way round, can say so. The library would
answer "Method not found!".
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc

from twinplane.grpc.status import abort, no_method_status


class UnknownMethods(grpc.aio.ServerInterceptor):
    """Refuses the calls that no servicer takes. `services` are the names of those that are served.

    It stands before whatever counts calls: anybody can make up names.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = tuple(services)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        handler = await continuation(handler_call_details)
        if handler is not None:
            return handler
        status = no_method_status(handler_call_details.method, self._services)

        async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await abort(context, status)

        # To grpc.aio each request is a stream then, of which it reads nothing by itself.
        return grpc.stream_stream_rpc_method_handler(refuse)
