"""A safetensors file that is read, not mapped: for files that others may write while we serve.

A page of a mapped file that was cut off is SIGBUS, the end of the process. A read only ends early.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from worker_service.load_errors import CheckpointInvalid
from worker_service.weights.sources.interface import DTYPES, bytes_of

_LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class _Entry:
    number_format: str
    shape: tuple[int, ...]
    start: int


class UnmappedFile:
    """As much of safetensors' handle as a Checkpoint uses. The file was found to be sound.

    Raises OSError or ValueError where it no longer is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        try:
            self._entries = self._read_header()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def keys(self) -> list[str]:
        """Every tensor's name."""
        return list(self._entries)

    def get_tensor(self, name: str) -> torch.Tensor:
        """A copy of the tensor. Raises CheckpointInvalid where the file has become shorter."""
        entry = self._entries[name]
        return self._read(name, entry, 0, entry.shape)

    def get_slice(self, name: str) -> UnmappedSlice:
        """What the tensor is, and parts of it."""
        return UnmappedSlice(self, name)

    def entry(self, name: str) -> _Entry:
        """What the header says of a tensor."""
        return self._entries[name]

    def rows(self, name: str, rows: slice) -> torch.Tensor:
        """A copy of some of the tensor's rows; reads only those."""
        entry = self._entries[name]
        width = math.prod(entry.shape[1:])
        shape = (rows.stop - rows.start, *entry.shape[1:])
        return self._read(name, entry, rows.start * width, shape)

    def _read(self, name: str, entry: _Entry, first: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Numbers from the `first` on."""
        dtype = DTYPES.get(entry.number_format)
        if dtype is None:
            raise CheckpointInvalid(f"{self._path}: {name} is stored as {entry.number_format}")
        tensor = torch.empty(shape, dtype=dtype)
        view = bytes_of(tensor).data
        self._file.seek(entry.start + first * dtype.itemsize)
        filled = 0
        while filled < len(view):
            count = self._file.readinto(view[filled:])
            if not count:
                raise CheckpointInvalid(
                    f"{self._path} ends in the middle of the tensor {name}: it was changed while "
                    "it was read"
                )
            filled += count
        return tensor

    def _read_header(self) -> dict[str, _Entry]:
        length = int.from_bytes(self._file.read(_LENGTH_BYTES) or b"", "little")
        header = json.loads(self._file.read(length) or b"")
        return {
            name: _Entry(
                each["dtype"],
                tuple(each["shape"]),
                _LENGTH_BYTES + length + each["data_offsets"][0],
            )
            for name, each in header.items()
            if name != "__metadata__"
        }


class UnmappedSlice:
    """A tensor of an UnmappedFile, in parts."""

    def __init__(self, file: UnmappedFile, name: str) -> None:
        self._file = file
        self._name = name

    def get_dtype(self) -> str:
        """The format as safetensors writes it."""
        return self._file.entry(self._name).number_format

    def get_shape(self) -> list[int]:
        """The whole tensor's."""
        return list(self._file.entry(self._name).shape)

    def __getitem__(self, part: slice | tuple[slice, slice]) -> torch.Tensor:
        """Rows, or columns of all rows."""
        if isinstance(part, slice):
            return self._file.rows(self._name, part)
        return self._file.get_tensor(self._name)[part]
