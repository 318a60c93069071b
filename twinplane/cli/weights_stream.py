"""Reads safetensors files of this machine as the tensors of a stream."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from twinplane.errors import TwinplaneError

_CHUNK_BYTES = 1024 * 1024
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100 * 1024 * 1024
_DATA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "F64": "DATA_TYPE_FLOAT64",
        "F32": "DATA_TYPE_FLOAT32",
        "BF16": "DATA_TYPE_BFLOAT16",
        "F16": "DATA_TYPE_FLOAT16",
    }
)


class CannotStream(TwinplaneError):
    """A file can't be read, or has no tensors that travel."""


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor, and where in which file its bytes are."""

    name: str
    data_type: str
    shape: tuple[int, ...]
    file: Path
    start: int
    byte_count: int


def tensors_at(path: Path) -> list[FileTensor]:
    """Those of a safetensors file, or of all that a folder has. Raises CannotStream."""
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise CannotStream(f"{path} has no safetensors files")
    return [tensor for file in files for tensor in _tensors_in(file)]


def messages(pb: Any, rollout: Any, tensors: Sequence[FileTensor]) -> Iterator[Any]:
    """The rollout with these tensors, and then their bytes."""
    for tensor in tensors:
        rollout.stream.tensors.add(name=tensor.name, data_type=tensor.data_type, shape=tensor.shape)
    yield pb.UpdateWeightsRequest(rollout=rollout)
    for index, tensor in enumerate(tensors):
        with tensor.file.open("rb") as file:
            file.seek(tensor.start)
            for offset in range(0, tensor.byte_count, _CHUNK_BYTES):
                request = pb.UpdateWeightsRequest()
                request.chunk.tensor_index, request.chunk.offset = index, offset
                request.chunk.data = file.read(min(_CHUNK_BYTES, tensor.byte_count - offset))
                yield request


def _tensors_in(file: Path) -> list[FileTensor]:
    try:
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
            if not 2 <= length <= _MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        found = [_tensor(file, _LENGTH_BYTES + length, *item) for item in header.items()]
        end = max((tensor.start + tensor.byte_count for tensor in found), default=0)
        if end > file.stat().st_size:
            raise ValueError("it ends early")
    except OSError as error:
        raise CannotStream(f"{file} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CannotStream(f"{file} is no safetensors file that can be sent: {error}") from error
    return sorted(found, key=lambda tensor: tensor.start)


def _tensor(file: Path, base: int, name: str, entry: Any) -> FileTensor:
    if entry["dtype"] not in _DATA_TYPES:
        raise ValueError(f"{name} is of format {entry['dtype']}")
    start, end = entry["data_offsets"]
    if not 0 <= start <= end:
        raise ValueError(f"{name} has no place")
    data_type = _DATA_TYPES[entry["dtype"]]
    return FileTensor(name, data_type, tuple(entry["shape"]), file, base + start, end - start)
