"""Converts messages about adapters to domain values, and back. Raises UpdateInvalid."""

from __future__ import annotations

from google.protobuf.message import Message

from twinplane.worker.v1 import adapters_pb2, info_pb2, weights_pb2
from worker_service.adapter_loading import (
    AdapterUpdate,
    DiskAdapter,
    StreamedAdapter,
    TensorChunk,
)
from worker_service.domain.adapters import (
    AdapterDescription,
    LoadedAdapter,
    TensorDescription,
)
from worker_service.domain.capability import DataType
from worker_service.domain.errors import UpdateInvalid

_MOST_DIMENSIONS = 8
_LARGEST_SIZE = 2**40


def update_from_pb(request: adapters_pb2.LoadAdapterRequest) -> AdapterUpdate:
    """The first message of a load."""
    _refuse_unknown_fields(request)
    if request.WhichOneof("message") != "update":
        raise UpdateInvalid("update", "the first message must be what to load where")
    update = request.update
    match update.WhichOneof("source"):
        case "disk":
            source: DiskAdapter | StreamedAdapter = DiskAdapter(update.disk.path)
        case "stream":
            source = StreamedAdapter(
                update.stream.config_json,
                tuple(
                    _tensor_from_pb(f"update.stream.tensors[{index}]", tensor)
                    for index, tensor in enumerate(update.stream.tensors)
                ),
            )
        case _:
            raise UpdateInvalid("update.source", "disk or stream must be set")
    return AdapterUpdate(update.epoch, update.slot, update.expected_digest, source)


def chunk_from_pb(request: adapters_pb2.LoadAdapterRequest) -> TensorChunk:
    """Any later message."""
    _refuse_unknown_fields(request)
    if request.WhichOneof("message") != "chunk":
        raise UpdateInvalid("chunk", "after the first message only chunks may come")
    chunk = request.chunk
    return TensorChunk(chunk.tensor_index, chunk.offset, chunk.data)


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


def _tensor_from_pb(path: str, tensor: weights_pb2.TensorDescription) -> TensorDescription:
    shape = tuple(tensor.shape)
    if len(shape) > _MOST_DIMENSIONS or any(size > _LARGEST_SIZE for size in shape):
        raise UpdateInvalid(f"{path}.shape", "is no shape of an adapter's tensor")
    if len(tensor.sha256) not in (0, 32):
        raise UpdateInvalid(f"{path}.sha256", f"{len(tensor.sha256)} bytes; 32 are wanted, or none")
    return TensorDescription(
        tensor.name, _data_type_from_pb(f"{path}.data_type", tensor.data_type), shape, tensor.sha256
    )


def _data_type_from_pb(path: str, data_type: info_pb2.DataType) -> DataType:
    match data_type:
        case info_pb2.DATA_TYPE_FLOAT32:
            return DataType.FLOAT32
        case info_pb2.DATA_TYPE_BFLOAT16:
            return DataType.BFLOAT16
        case info_pb2.DATA_TYPE_FLOAT16:
            return DataType.FLOAT16
        case _:  # unspecified, or of a newer contract: proto3 enums are open
            raise UpdateInvalid(path, f"{data_type} is no format of this contract")


def _refuse_unknown_fields(request: Message) -> None:
    size = request.ByteSize()
    request.DiscardUnknownFields()
    if request.ByteSize() != size:
        raise UpdateInvalid("message", "has fields that this worker does not know")
