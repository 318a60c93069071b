"""Converts messages about adapters to domain values, and back. Raises UpdateInvalid."""

from __future__ import annotations

from twinplane.worker.v1 import adapters_pb2
from worker_service.adapter_loading import (
    AdapterUpdate,
    DiskAdapter,
    StreamedAdapter,
)
from worker_service.domain.adapters import (
    AdapterDescription,
    LoadedAdapter,
)
from worker_service.domain.errors import UpdateInvalid
from worker_service.domain.weights import TensorChunk
from worker_service.rpc import weights


def update_from_pb(request: adapters_pb2.LoadAdapterRequest) -> AdapterUpdate:
    """The first message of a load."""
    weights.refuse_unknown_fields("message", request)
    if request.WhichOneof("message") != "update":
        raise UpdateInvalid("update", "the first message must be what to load where")
    update = request.update
    match update.WhichOneof("source"):
        case "disk":
            source: DiskAdapter | StreamedAdapter = DiskAdapter(update.disk.path)
        case "stream":
            source = StreamedAdapter(
                update.stream.config_json,
                weights.tensors_from_pb("update.stream.tensors", update.stream.tensors),
            )
        case _:
            raise UpdateInvalid("update.source", "disk or stream must be set")
    return AdapterUpdate(update.epoch, update.slot, update.expected_digest, source)


def chunk_of(request: adapters_pb2.LoadAdapterRequest) -> TensorChunk:
    """Any later message."""
    weights.refuse_unknown_fields("message", request)
    if request.WhichOneof("message") != "chunk":
        raise UpdateInvalid("chunk", "after the first message only chunks may come")
    return weights.chunk_from_pb(request.chunk)


def description_to_pb(adapter: AdapterDescription) -> adapters_pb2.AdapterDescription:
    """What was loaded."""
    return adapters_pb2.AdapterDescription(
        digest=adapter.digest,
        rank=adapter.rank,
        scale=adapter.scale,
        target_modules=adapter.target_modules,
    )


def held_to_pb(held: tuple[LoadedAdapter, ...]) -> adapters_pb2.ListAdaptersResponse:
    """What the slots hold."""
    return adapters_pb2.ListAdaptersResponse(
        adapters=[
            adapters_pb2.LoadedAdapter(
                slot=each.slot,
                adapter=description_to_pb(each.adapter),
                device_bytes=each.device_bytes,
            )
            for each in held
        ]
    )
