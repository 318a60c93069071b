"""Converts messages about weights to domain values, and back. What a message alone shows to be
wrong is refused here, with UpdateInvalid, which names the field."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypeVar

from google.protobuf.message import Message

from twinplane.worker.v1 import info_pb2, weights_pb2
from worker_service.domain.errors import SourceLost, UpdateInvalid
from worker_service.domain.weights import (
    CommittedWeights,
    CudaMemory,
    DiskSource,
    DistributedSource,
    GroupBackend,
    IpcSource,
    Placement,
    PosixMemory,
    PreparedWeights,
    SleepTag,
    Source,
    StreamSource,
    Target,
    TensorChunk,
    TensorDescription,
    WeightsUpdate,
)
from worker_service.rpc.convert import duration_to_pb, version_to_pb

_UPDATE_ID = re.compile(r"[!-~]{1,128}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHA256_BYTES = 32
_MAX_DIMENSIONS = 8
_GROUP_KEY = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_SHARED_NAME = re.compile(r"/[!-.0-~]{1,254}")
_CUDA_HANDLE_BYTES = 64
_MAX_WORLD_SIZE = 4096
_MAX_WAIT_SECONDS = 3600.0

E = TypeVar("E", bound=int)
T = TypeVar("T")

_FORMATS: Mapping[info_pb2.DataType, str] = MappingProxyType(
    {
        info_pb2.DATA_TYPE_FLOAT32: "F32",
        info_pb2.DATA_TYPE_BFLOAT16: "BF16",
        info_pb2.DATA_TYPE_FLOAT16: "F16",
        info_pb2.DATA_TYPE_FLOAT64: "F64",
    }
)
_DATA_TYPES = MappingProxyType({name: each for each, name in _FORMATS.items()})
_TARGETS: Mapping[weights_pb2.WeightsTarget, Target] = MappingProxyType(
    {
        weights_pb2.WEIGHTS_TARGET_MODEL: Target.MODEL,
        weights_pb2.WEIGHTS_TARGET_DRAFT: Target.DRAFT,
    }
)
_PLACEMENTS: Mapping[weights_pb2.WeightsPlacement, Placement] = MappingProxyType(
    {
        weights_pb2.WEIGHTS_PLACEMENT_UNSPECIFIED: Placement.AUTO,
        weights_pb2.WEIGHTS_PLACEMENT_BESIDE: Placement.BESIDE,
        weights_pb2.WEIGHTS_PLACEMENT_IN_PLACE: Placement.IN_PLACE,
    }
)
_PLACEMENTS_TO_PB = MappingProxyType({ours: each for each, ours in _PLACEMENTS.items()})
_BACKENDS: Mapping[weights_pb2.GroupBackend, GroupBackend] = MappingProxyType(
    {
        weights_pb2.GROUP_BACKEND_GLOO: GroupBackend.GLOO,
        weights_pb2.GROUP_BACKEND_NCCL: GroupBackend.NCCL,
    }
)
_TAGS: Mapping[weights_pb2.SleepTag, SleepTag] = MappingProxyType(
    {
        weights_pb2.SLEEP_TAG_WEIGHTS: SleepTag.WEIGHTS,
        weights_pb2.SLEEP_TAG_KV: SleepTag.KV,
    }
)
_TAGS_TO_PB = MappingProxyType({ours: each for each, ours in _TAGS.items()})


async def first_of(
    requests: AsyncIterator[weights_pb2.PrepareWeightsRequest],
) -> weights_pb2.WeightsUpdate:
    """The update of a stream's first message. Raises UpdateInvalid or SourceLost."""
    async for request in requests:
        refuse_unknown_fields("update", request)
        if request.WhichOneof("message") != "update":
            raise UpdateInvalid("update", "must be the first message")
        return request.update
    raise SourceLost("the stream ended before it said what the update is")


async def chunks_of(
    requests: AsyncIterator[weights_pb2.PrepareWeightsRequest],
) -> AsyncIterator[TensorChunk]:
    """The messages behind the first. Raises UpdateInvalid."""
    async for request in requests:
        if request.WhichOneof("message") != "chunk":
            raise UpdateInvalid("chunk", "every message but the first must be a chunk")
        yield chunk_from_pb(request.chunk)


def chunk_from_pb(chunk: weights_pb2.TensorChunk) -> TensorChunk:
    """Bytes of a streamed tensor."""
    return TensorChunk(chunk.tensor_index, chunk.offset, chunk.data)


def update_from_pb(update: weights_pb2.WeightsUpdate) -> WeightsUpdate:
    """What an update is. Raises UpdateInvalid."""
    require_update_id("update.update_id", update.update_id)
    if update.expected_digest and not _DIGEST.fullmatch(update.expected_digest):
        raise UpdateInvalid(
            "update.expected_digest", "must be a SHA-256 in 64 hexadecimal digits, or empty"
        )
    return WeightsUpdate(
        update_id=update.update_id,
        source=_source_from_pb(update),
        target=_chosen("update.target", _TARGETS, update.target),
        is_partial=update.is_partial,
        placement=_chosen("update.placement", _PLACEMENTS, update.placement),
        expected_digest=update.expected_digest,
    )


def require_update_id(field_path: str, update_id: str) -> None:
    """Raises UpdateInvalid."""
    if not _UPDATE_ID.fullmatch(update_id):
        raise UpdateInvalid(field_path, "must have 1 to 128 printable ASCII characters, no spaces")


def tensors_from_pb(
    field_path: str, tensors: Sequence[weights_pb2.TensorDescription]
) -> tuple[TensorDescription, ...]:
    """Tensors as an update describes them. Raises UpdateInvalid."""
    if not tensors:
        raise UpdateInvalid(field_path, "missing")
    return tuple(
        _tensor_from_pb(f"{field_path}[{index}]", tensor) for index, tensor in enumerate(tensors)
    )


def tensor_to_pb(tensor: TensorDescription) -> weights_pb2.TensorDescription:
    """A live tensor. Of a simulated worker it may be in any format, which is then not said."""
    return weights_pb2.TensorDescription(
        name=tensor.name,
        data_type=_DATA_TYPES.get(tensor.number_format, info_pb2.DATA_TYPE_UNSPECIFIED),
        shape=tensor.shape,
        sha256=tensor.sha256,
    )


def prepared_to_pb(prepared: PreparedWeights) -> weights_pb2.PrepareWeightsResponse:
    """What waits for its commit."""
    return weights_pb2.PrepareWeightsResponse(
        prepared=weights_pb2.PreparedWeights(
            update_id=prepared.update_id,
            digest=prepared.digest,
            placement=_PLACEMENTS_TO_PB[prepared.placement],
            device_bytes=prepared.device_bytes,
            host_bytes=prepared.host_bytes,
        )
    )


def committed_to_pb(committed: CommittedWeights) -> weights_pb2.CommitWeightsResponse:
    """What is live."""
    return weights_pb2.CommitWeightsResponse(
        weight_version=version_to_pb(committed.version),
        paused=duration_to_pb(committed.paused_seconds),
    )


def tags_from_pb(tags: Sequence[weights_pb2.SleepTag]) -> frozenset[SleepTag]:
    """What is to sleep or to wake. Raises UpdateInvalid."""
    if not tags:
        raise UpdateInvalid("tags", "missing")
    return frozenset(_chosen("tags", _TAGS, tag) for tag in tags)


def tags_to_pb(tags: Iterable[SleepTag]) -> list[weights_pb2.SleepTag]:
    """What sleeps, in the contract's order."""
    return sorted(_TAGS_TO_PB[tag] for tag in tags)


def _source_from_pb(update: weights_pb2.WeightsUpdate) -> Source:
    match update.WhichOneof("source"):
        case "disk":
            return DiskSource(update.disk.path)
        case "stream":
            return StreamSource(tensors_from_pb("update.stream.tensors", update.stream.tensors))
        case "distributed":
            return _distributed_from_pb(update.distributed)
        case "ipc":
            return _ipc_from_pb(update.ipc)
        case None:
            raise UpdateInvalid("update.source", "missing")
        case other:
            raise UpdateInvalid(f"update.{other}", "is a source that this worker does not read")


def _distributed_from_pb(source: weights_pb2.DistributedSource) -> DistributedSource:
    path = "update.distributed"
    host, _, port = source.address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16):
        raise UpdateInvalid(f"{path}.address", "must be host:port")
    if not 2 <= source.world_size <= _MAX_WORLD_SIZE:
        raise UpdateInvalid(f"{path}.world_size", f"must be 2 to {_MAX_WORLD_SIZE}")
    if source.rank >= source.world_size:
        raise UpdateInvalid(
            f"{path}.rank", f"{source.rank} is none of {source.world_size} members' ranks"
        )
    if source.source_rank >= source.world_size or source.source_rank == source.rank:
        raise UpdateInvalid(f"{path}.source_rank", "must be another member's rank")
    if not _GROUP_KEY.fullmatch(source.key):
        raise UpdateInvalid(
            f"{path}.key", "must have 1 to 128 letters of ASCII, digits or any of - _ . :"
        )
    seconds = 60.0
    if source.HasField("timeout"):
        seconds = source.timeout.seconds + source.timeout.nanos / 1e9
        if not 0 < seconds <= _MAX_WAIT_SECONDS:
            raise UpdateInvalid(f"{path}.timeout", "must be longer than 0, and at most an hour")
    return DistributedSource(
        host=host,
        port=int(port),
        world_size=source.world_size,
        rank=source.rank,
        source_rank=source.source_rank,
        backend=_chosen(f"{path}.backend", _BACKENDS, source.backend),
        key=source.key,
        tensors=tensors_from_pb(f"{path}.tensors", source.tensors),
        bucket_bytes=source.bucket_bytes,
        timeout_seconds=seconds,
    )


def _ipc_from_pb(source: weights_pb2.IpcSource) -> IpcSource:
    path = "update.ipc"
    memory: PosixMemory | CudaMemory
    match source.WhichOneof("memory"):
        case "posix":
            name = source.posix.name
            if not _SHARED_NAME.fullmatch(name) or name in ("/.", "/.."):
                raise UpdateInvalid(
                    f"{path}.posix.name",
                    "must be a slash and 1 to 254 printable ASCII characters without another",
                )
            memory = PosixMemory(name)
        case "cuda":
            if len(source.cuda.handle) != _CUDA_HANDLE_BYTES:
                raise UpdateInvalid(f"{path}.cuda.handle", f"must have {_CUDA_HANDLE_BYTES} bytes")
            memory = CudaMemory(source.cuda.handle, source.cuda.device_uuid)
        case _:
            raise UpdateInvalid(f"{path}.memory", "missing")
    if not source.tensors:
        raise UpdateInvalid(f"{path}.tensors", "missing")
    return IpcSource(
        memory=memory,
        byte_count=source.byte_count,
        tensors=tuple(
            _tensor_from_pb(f"{path}.tensors[{index}].tensor", each.tensor)
            for index, each in enumerate(source.tensors)
        ),
        offsets=tuple(each.offset for each in source.tensors),
    )


def _tensor_from_pb(field_path: str, tensor: weights_pb2.TensorDescription) -> TensorDescription:
    number_format = _FORMATS.get(tensor.data_type)
    if number_format is None:
        raise UpdateInvalid(f"{field_path}.data_type", f"{tensor.data_type} is no number format")
    if len(tensor.shape) > _MAX_DIMENSIONS:
        raise UpdateInvalid(f"{field_path}.shape", f"has more than {_MAX_DIMENSIONS} dimensions")
    if len(tensor.sha256) not in (0, _SHA256_BYTES):
        raise UpdateInvalid(f"{field_path}.sha256", f"must have {_SHA256_BYTES} bytes, or none")
    return TensorDescription(tensor.name, number_format, tuple(tensor.shape), tensor.sha256)


def _chosen(field_path: str, choices: Mapping[E, T], value: E) -> T:
    chosen = choices.get(value)
    if chosen is None:  # unspecified, or of a newer contract: proto3 enums are open
        raise UpdateInvalid(field_path, f"{value} is none of this contract's choices")
    return chosen


def refuse_unknown_fields(field_path: str, request: Message) -> None:
    """Fields of a newer contract ask for what this worker can't do. Raises UpdateInvalid."""
    size = request.ByteSize()
    request.DiscardUnknownFields()
    if request.ByteSize() != size:
        raise UpdateInvalid(field_path, "has fields that this worker's contract lacks")
