"""Weights that an operator streams: received, checked and kept as a safetensors file."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO

from control_plane.core.weights import SpooledSource
from control_plane.rpc.checker import Checker
from control_plane.rpc.errors import InvalidRequest, SpoolFull
from twinplane.control.v1 import control_pb2 as pb
from twinplane.errors import Violation
from twinplane.worker.v1 import info_pb2, weights_pb2

_SHA256_BYTES = 32
_MOST_DIMENSIONS = 8
_MAX_NAME_CHARACTERS = 512
_MAX_TENSOR_BYTES = 1 << 50
_ALIGNMENT = 8
_FORMATS: Mapping[int, tuple[str, int]] = MappingProxyType(
    {
        info_pb2.DATA_TYPE_FLOAT64: ("F64", 8),
        info_pb2.DATA_TYPE_FLOAT32: ("F32", 4),
        info_pb2.DATA_TYPE_BFLOAT16: ("BF16", 2),
        info_pb2.DATA_TYPE_FLOAT16: ("F16", 2),
    }
)
"""Of the contract's: the name in a safetensors file, and the bytes of a number."""
_SOURCE = "rollout.stream"


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    data_type: str
    shape: tuple[int, ...]
    byte_count: int
    sha256: bytes


async def spool(
    source: weights_pb2.StreamSource,
    requests: AsyncIterator[pb.UpdateWeightsRequest],
    path: Path,
) -> SpooledSource:
    """Receives the tensors into a file at `path`, which the caller removes if this fails. Raises
    InvalidRequest or SpoolFull."""
    tensors = _checked(source)
    free = shutil.disk_usage(path.parent).free
    needed = sum(tensor.byte_count for tensor in tensors)
    if needed > free:
        raise SpoolFull(needed, free)
    with _created(path) as file:
        await asyncio.to_thread(file.write, _header(tensors))
        await _receive(tensors, requests, file)
        await asyncio.to_thread(_settle, file)
    digests = tuple((each.name, each.sha256) for each in tensors if each.sha256)
    return SpooledSource(str(path), digests)


async def _receive(
    tensors: Sequence[_Tensor], requests: AsyncIterator[pb.UpdateWeightsRequest], file: BinaryIO
) -> None:
    """Writes the chunks, which come in order and without a gap."""
    index = offset = 0
    async for request in requests:
        if request.WhichOneof("message") != "chunk":
            raise _refused("message", "behind the first message there are only chunks")
        chunk = request.chunk
        while index < len(tensors) and offset == tensors[index].byte_count:
            index, offset = index + 1, 0
        if index == len(tensors):
            raise _refused("chunk", "the source has no more bytes")
        tensor = tensors[index]
        if (chunk.tensor_index, chunk.offset) != (index, offset):
            raise _refused("chunk", f"byte {offset} of tensor {index}, {tensor.name!r}, comes next")
        if not 0 < len(chunk.data) <= tensor.byte_count - offset:
            raise _refused(
                "chunk.data",
                f"has {len(chunk.data)} bytes; 1 to {tensor.byte_count - offset} are left",
            )
        await asyncio.to_thread(file.write, chunk.data)
        offset += len(chunk.data)
    while index < len(tensors) and offset == tensors[index].byte_count:
        index, offset = index + 1, 0
    if index < len(tensors):
        raise _refused("chunk", f"the stream ends within {tensors[index].name!r}")


def _checked(source: weights_pb2.StreamSource) -> list[_Tensor]:
    """What is announced. Raises InvalidRequest."""
    checker = Checker()
    checker.known_fields(source, f"{_SOURCE}.")
    checker.require(len(source.tensors) > 0, f"{_SOURCE}.tensors", "must not be empty")
    tensors: list[_Tensor] = []
    names: set[str] = set()
    for index, each in enumerate(source.tensors):
        path = f"{_SOURCE}.tensors[{index}]"
        checker.known_fields(each, f"{path}.")
        is_named = 0 < len(each.name) <= _MAX_NAME_CHARACTERS and each.name != "__metadata__"
        is_right = checker.require(
            is_named and each.name not in names, f"{path}.name", "must be a name of its own"
        )
        names.add(each.name)
        is_right &= checker.require(
            each.data_type in _FORMATS, f"{path}.data_type", "must be a format of tensors"
        )
        is_right &= checker.require(
            len(each.shape) <= _MOST_DIMENSIONS,
            f"{path}.shape",
            f"has more than {_MOST_DIMENSIONS} dimensions",
        )
        is_right &= checker.require(
            len(each.sha256) in (0, _SHA256_BYTES), f"{path}.sha256", "must have 32 bytes, or none"
        )
        if not is_right:
            break  # one tensor is enough: there may be thousands
        data_type, byte_count = _FORMATS[each.data_type]
        for dimension in each.shape:
            byte_count *= dimension
        if not checker.require(
            byte_count <= _MAX_TENSOR_BYTES, f"{path}.shape", "is larger than any tensor"
        ):
            break
        tensors.append(_Tensor(each.name, data_type, tuple(each.shape), byte_count, each.sha256))
    checker.raise_if_any()
    return tensors


def _header(tensors: Sequence[_Tensor]) -> bytes:
    entries: dict[str, object] = {}
    start = 0
    for tensor in tensors:
        end = start + tensor.byte_count
        entries[tensor.name] = {
            "dtype": tensor.data_type,
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
        start = end
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _created(path: Path) -> BinaryIO:
    """At once, not on a thread: whoever cancels the call meanwhile would leave it open."""
    return path.open("xb")


def _settle(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _refused(field: str, rule: str) -> InvalidRequest:
    return InvalidRequest([Violation(field, rule)])
