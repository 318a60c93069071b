"""How a worker is given other weights over gRPC: updates as messages, and tensors as chunks.

A spooled file is read while it is sent, a chunk at a time: it never lies in memory.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, assert_never

import grpc
from google.protobuf.duration_pb2 import Duration

from control_plane.core.weights import (
    DiskSource,
    DistributedSource,
    Placement,
    PreparedWeights,
    SharedMemorySource,
    SpooledSource,
    TensorDescription,
    WeightsUpdate,
)
from twinplane.worker.v1 import weights_pb2

CHUNK_BYTES = 1024 * 1024
_ATTEMPTS = 5
_UNSENT = "execute_batch"
"""What the library says of a message that it could not send, in place of the status."""
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_LENGTH_BYTES = 8

_FORMATS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {
        "F64": ("float64", 8),
        "F32": ("float32", 4),
        "BF16": ("bfloat16", 2),
        "F16": ("float16", 2),
    }
)
"""Of a safetensors file: our name, and the bytes of a number."""
_BACKENDS: Mapping[str, weights_pb2.GroupBackend] = MappingProxyType(
    {"gloo": weights_pb2.GROUP_BACKEND_GLOO, "nccl": weights_pb2.GROUP_BACKEND_NCCL}
)
_PLACEMENTS: Mapping[Placement, weights_pb2.WeightsPlacement] = MappingProxyType(
    {
        Placement.AUTO: weights_pb2.WEIGHTS_PLACEMENT_UNSPECIFIED,
        Placement.BESIDE: weights_pb2.WEIGHTS_PLACEMENT_BESIDE,
        Placement.IN_PLACE: weights_pb2.WEIGHTS_PLACEMENT_IN_PLACE,
    }
)


class SpoolUnusable(Exception):
    """A spooled file can't be read, or is no safetensors file of formats that travel."""


class Spool:
    """A safetensors file that is open. `tensors` are in the order of their bytes."""

    def __init__(self, source: SpooledSource) -> None:
        """Opens it and reads its header. Raises SpoolUnusable."""
        self._reading = asyncio.Lock()
        self._is_open = True
        try:
            self._file = os.open(source.path, os.O_RDONLY)
        except OSError as error:
            raise SpoolUnusable(f"{source.path} can't be read: {error.strerror}") from error
        try:
            self.tensors, self._start = _header(self._file, dict(source.sha256))
        except (ValueError, KeyError, TypeError, OSError) as error:
            os.close(self._file)
            raise SpoolUnusable(f"{source.path} is no spool of weights: {error}") from error

    async def close(self) -> None:
        """Closes the file, once nobody reads it; `chunks` end then."""
        async with self._reading:
            self._is_open = False
            os.close(self._file)

    async def chunks(self) -> AsyncIterator[weights_pb2.TensorChunk]:
        """The bytes of all tensors, in order."""
        for index, (tensor, start, size) in enumerate(self.tensors):
            for offset in range(0, size, CHUNK_BYTES):
                count = min(CHUNK_BYTES, size - offset)
                position = self._start + start + offset
                async with self._reading:  # gRPC reads on for a moment when a call is over
                    if not self._is_open:
                        return
                    data = await asyncio.to_thread(os.pread, self._file, count, position)
                if len(data) != count:
                    raise SpoolUnusable(f"{tensor.name} ends early")
                yield weights_pb2.TensorChunk(tensor_index=index, offset=offset, data=data)


def _header(
    file: int, digests: Mapping[str, bytes]
) -> tuple[list[tuple[TensorDescription, int, int]], int]:
    """The tensors with where each begins and its bytes, and where the first begins in the file."""
    length = int.from_bytes(os.pread(file, _LENGTH_BYTES, 0), "little")
    if not 2 <= length <= _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    header = json.loads(os.pread(file, length, _LENGTH_BYTES))
    header.pop("__metadata__", None)
    found = []
    for name, entry in header.items():
        if entry["dtype"] not in _FORMATS:
            raise ValueError(f"{name} is of format {entry['dtype']}")
        data_type, width = _FORMATS[entry["dtype"]]
        start, end = entry["data_offsets"]
        size = width
        for dimension in entry["shape"]:
            size *= dimension
        if size != end - start:
            raise ValueError(f"{name} has {end - start} bytes instead of {size}")
        shape = tuple(entry["shape"])
        found.append(
            (TensorDescription(name, data_type, shape, digests.get(name, b"")), start, size)
        )
    found.sort(key=lambda each: each[1])
    return found, _LENGTH_BYTES + length


async def prepare(stub: Any, epoch: int, update: WeightsUpdate) -> PreparedWeights:
    """Sends an update and, of a spool, its tensors. Raises AioRpcError or SpoolUnusable.

    A worker may refuse an update while its tensors come. gRPC then loses the worker's reason, when
    a message was on its way just then: so the update is sent again, and refused again.
    """
    for _ in range(_ATTEMPTS - 1):
        try:
            return await _prepare(stub, epoch, update)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INTERNAL or _UNSENT not in str(error):
                raise
    return await _prepare(stub, epoch, update)


async def _prepare(stub: Any, epoch: int, update: WeightsUpdate) -> PreparedWeights:
    spool = None
    if isinstance(update.source, SpooledSource):
        spool = await asyncio.to_thread(Spool, update.source)
    troubles: list[SpoolUnusable] = []
    message = update_to_pb(epoch, update, spool)
    try:
        answer = await stub.PrepareWeights(_messages(message, spool, troubles))
    except asyncio.CancelledError:
        # gRPC cancels a call whose messages can't be made, and does not say why.
        task = asyncio.current_task()
        if troubles and not (task is not None and task.cancelling()):
            raise troubles[0] from None
        raise
    finally:
        if spool is not None:
            await spool.close()
    return prepared_from_pb(answer.prepared)


async def _messages(
    update: weights_pb2.WeightsUpdate, spool: Spool | None, troubles: list[SpoolUnusable]
) -> AsyncIterator[weights_pb2.PrepareWeightsRequest]:
    """The update and a spool's chunks. What is wrong with the spool goes to `troubles`, too."""
    yield weights_pb2.PrepareWeightsRequest(update=update)
    if spool is not None:
        try:
            async for chunk in spool.chunks():
                yield weights_pb2.PrepareWeightsRequest(chunk=chunk)
        except SpoolUnusable as error:
            troubles.append(error)
            raise


def update_to_pb(
    epoch: int, update: WeightsUpdate, spool: Spool | None = None
) -> weights_pb2.WeightsUpdate:
    """An update as a worker takes it. A spooled source needs its `spool`."""
    message = weights_pb2.WeightsUpdate(
        epoch=epoch,
        update_id=update.update_id,
        target=weights_pb2.WEIGHTS_TARGET_MODEL,
        is_partial=update.is_partial,
        placement=_PLACEMENTS[update.placement],
        expected_digest=update.expected_digest,
    )
    source = update.source
    match source:
        case DiskSource(path=path):
            message.disk.path = path
        case SpooledSource():
            assert spool is not None
            message.stream.SetInParent()
            message.stream.tensors.extend(tensor_to_pb(tensor) for tensor, _, _ in spool.tensors)
        case DistributedSource():
            message.distributed.CopyFrom(_distributed_to_pb(source))
        case SharedMemorySource():
            message.ipc.CopyFrom(_shared_to_pb(source))
        case _:
            assert_never(source)
    return message


def prepared_from_pb(prepared: weights_pb2.PreparedWeights) -> PreparedWeights:
    """What a worker has prepared."""
    in_place = prepared.placement == weights_pb2.WEIGHTS_PLACEMENT_IN_PLACE
    return PreparedWeights(
        update_id=prepared.update_id,
        digest=prepared.digest,
        placement=Placement.IN_PLACE if in_place else Placement.BESIDE,
        device_bytes=prepared.device_bytes,
        host_bytes=prepared.host_bytes,
    )


def _distributed_to_pb(source: DistributedSource) -> weights_pb2.DistributedSource:
    whole, fraction = divmod(round(source.timeout_seconds * 1e9), 10**9)
    return weights_pb2.DistributedSource(
        address=source.address,
        world_size=source.world_size,
        rank=source.first_rank,
        source_rank=source.source_rank,
        backend=_BACKENDS[source.backend],
        key=source.key,
        tensors=map(tensor_to_pb, source.tensors),
        bucket_bytes=source.bucket_bytes,
        timeout=Duration(seconds=whole, nanos=fraction),
    )


def _shared_to_pb(source: SharedMemorySource) -> weights_pb2.IpcSource:
    message = weights_pb2.IpcSource(
        byte_count=source.byte_count,
        tensors=[
            weights_pb2.SharedTensor(tensor=tensor_to_pb(tensor), offset=offset)
            for tensor, offset in source.tensors
        ],
    )
    if source.cuda_handle:
        message.cuda.handle = source.cuda_handle
        message.cuda.device_uuid = source.cuda_device_uuid
    else:
        message.posix.name = source.posix_name
    return message


def tensor_to_pb(tensor: TensorDescription) -> weights_pb2.TensorDescription:
    return weights_pb2.TensorDescription(
        name=tensor.name,
        data_type=f"DATA_TYPE_{tensor.data_type.upper()}",
        shape=tensor.shape,
        sha256=tensor.sha256,
    )
