"""The part of ModelRunnerService that is about adapters."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from twinplane.grpc.refused_streams import read_out
from twinplane.worker.v1 import adapters_pb2
from worker_service.adapter_loading import AdapterLoading
from worker_service.domain.errors import UpdateInvalid, WorkerError
from worker_service.domain.weights import TensorChunk
from worker_service.rpc import adapter_convert as convert

_Context = grpc.aio.ServicerContext[Any, Any]


class AdapterMethods:
    """LoadAdapter, UnloadAdapter and ListAdapters. Refusals are raised unchanged."""

    _adapters: AdapterLoading

    async def LoadAdapter(  # noqa: N802
        self,
        request_iterator: AsyncIterator[adapters_pb2.LoadAdapterRequest],
        context: _Context,
    ) -> adapters_pb2.LoadAdapterResponse:
        """Loads an adapter into a slot."""
        requests = aiter(request_iterator)
        first = await anext(requests, None)
        if first is None:
            raise UpdateInvalid("update", "missing")

        async def chunks() -> AsyncIterator[TensorChunk]:
            async for request in requests:
                yield convert.chunk_of(request)

        try:
            loaded = await self._adapters.load(convert.update_from_pb(first), chunks())
        except WorkerError:
            await read_out(requests)
            raise
        return adapters_pb2.LoadAdapterResponse(adapter=convert.description_to_pb(loaded.adapter))

    async def UnloadAdapter(  # noqa: N802
        self, request: adapters_pb2.UnloadAdapterRequest, context: _Context
    ) -> adapters_pb2.UnloadAdapterResponse:
        """Empties a slot."""
        await self._adapters.unload(request.epoch, request.slot)
        return adapters_pb2.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self, request: adapters_pb2.ListAdaptersRequest, context: _Context
    ) -> adapters_pb2.ListAdaptersResponse:
        """Returns what the slots hold."""
        return convert.held_to_pb(await self._adapters.held())
