"""The RPCs of ModelRunnerService that change the weights, or free memory for a while."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from twinplane.grpc.refused_streams import read_out
from twinplane.worker.v1 import weights_pb2
from worker_service.domain.errors import WorkerError
from worker_service.facade import WorkerFacade
from worker_service.rpc import weights
from worker_service.rpc.convert import version_to_pb

_Context = grpc.aio.ServicerContext[Any, Any]


class WeightsMethods:
    """Part of ModelRunnerServicer."""

    _facade: WorkerFacade

    async def PrepareWeights(  # noqa: N802
        self,
        request_iterator: AsyncIterator[weights_pb2.PrepareWeightsRequest],
        context: _Context,
    ) -> weights_pb2.PrepareWeightsResponse:
        """Prepares other weights. When the sender leaves, this task is cancelled, and with it the
        preparation."""
        try:
            self._facade.lifecycle.require_serving()
            update = await weights.first_of(request_iterator)
            prepared = await self._facade.updates.prepare(
                update.epoch, weights.update_from_pb(update), weights.chunks_of(request_iterator)
            )
        except WorkerError:
            await read_out(request_iterator)
            raise
        return weights.prepared_to_pb(prepared)

    async def CommitWeights(  # noqa: N802
        self, request: weights_pb2.CommitWeightsRequest, context: _Context
    ) -> weights_pb2.CommitWeightsResponse:
        """Makes them live."""
        weights.require_update_id("update_id", request.update_id)
        committed = await self._facade.updates.commit(
            request.epoch, request.update_id, request.digest
        )
        return weights.committed_to_pb(committed)

    async def AbortWeights(  # noqa: N802
        self, request: weights_pb2.AbortWeightsRequest, context: _Context
    ) -> weights_pb2.AbortWeightsResponse:
        """Drops them."""
        weights.require_update_id("update_id", request.update_id)
        await self._facade.updates.abort(request.epoch, request.update_id)
        return weights_pb2.AbortWeightsResponse()

    async def ListTensors(  # noqa: N802
        self, request: weights_pb2.ListTensorsRequest, context: _Context
    ) -> weights_pb2.ListTensorsResponse:
        """Tells the live weights, tensor by tensor."""
        version, tensors = self._facade.updates.tensors()
        return weights_pb2.ListTensorsResponse(
            weight_version=version_to_pb(version),
            tensors=[weights.tensor_to_pb(tensor) for tensor in tensors],
        )

    async def Sleep(  # noqa: N802
        self, request: weights_pb2.SleepRequest, context: _Context
    ) -> weights_pb2.SleepResponse:
        """Frees memory."""
        tags = weights.tags_from_pb(request.tags)
        asleep = await self._facade.updates.sleep(request.epoch, tags)
        return weights_pb2.SleepResponse(asleep=weights.tags_to_pb(asleep))

    async def Wake(  # noqa: N802
        self, request: weights_pb2.WakeRequest, context: _Context
    ) -> weights_pb2.WakeResponse:
        """Takes it again."""
        tags = weights.tags_from_pb(request.tags)
        asleep = await self._facade.updates.wake(request.epoch, tags)
        return weights_pb2.WakeResponse(asleep=weights.tags_to_pb(asleep))
