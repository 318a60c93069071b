"""A Hugging Face model folder: config.json and safetensors files, read through a memory map.

Knows files and tensor names, nothing of what they mean; never writes but a small digest cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from twinplane.models.errors import ModelInvalid
from twinplane.models.folder import CONFIG_NAME, INDEX_NAME, open_folder, unreadable
from twinplane.paths import utf8_path
from worker_service.load_errors import CheckpointInvalid

DIGEST_CACHE_NAME = ".twinplane-digest.json"
_HASH_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class _FileStamp:
    """Identifies a file's content as far as its metadata can."""

    name: str
    size: int
    modified_nanoseconds: int

    @classmethod
    def of(cls, path: Path) -> Self:
        status = path.stat()
        return cls(path.name, status.st_size, status.st_mtime_ns)

    def encoded(self) -> list[str | int]:
        return [self.name, self.size, self.modified_nanoseconds]


class Checkpoint:
    """An open model folder. A context manager: tensors taken from it outlive it only as copies.

    Raises CheckpointInvalid when a file is missing, is not what its name says, or lacks a tensor.
    """

    def __init__(self, folder: Path) -> None:
        try:
            files = open_folder(folder)
        except ModelInvalid as invalid:
            raise CheckpointInvalid(str(invalid)) from invalid
        self.folder = folder
        self.config = files.config
        self.weight_files = files.weight_files
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for path in self.weight_files:
                self._open(path, files.weight_map)
            self._check_index(files.weight_map)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the files."""
        self._files.clear()
        self._stack.close()

    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        return frozenset(self._files)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name` in its stored dtype, mapped, not copied.

        Raises CheckpointInvalid when it is missing or has another shape.
        """
        tensor = self._source(name).get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        self._check_shape(name, tuple(tensor.shape), shape)
        return tensor

    def part(self, name: str, shape: tuple[int, ...], axis: int, part: range) -> torch.Tensor:
        """A copy of part of the tensor `name`, along the first or second axis; reads only that.

        Raises CheckpointInvalid when it is missing or the whole has another shape than `shape`.
        """
        stored = self._source(name).get_slice(name)
        self._check_shape(name, tuple(stored.get_shape()), shape)
        own = slice(part.start, part.stop)
        tensor = stored[own] if axis == 0 else stored[:, own]
        assert isinstance(tensor, torch.Tensor)
        return tensor

    def stored_format(self, name: str) -> str:
        """The format of the tensor `name` as safetensors writes it: F32, BF16, I8 …

        `name` is one of names().
        """
        return str(self._files[name].get_slice(name).get_dtype())

    def digest(self) -> str:
        """Hex SHA-256 over config.json and the weight files, each preceded by its name and size.

        Remembered beside the files for as long as their names, sizes and times stay the same.
        """
        try:
            return self._digest([self.folder / CONFIG_NAME, *self.weight_files])
        except OSError as error:
            path = Path(error.filename or self.folder)
            raise CheckpointInvalid(unreadable(path, error)) from error

    def _digest(self, paths: list[Path]) -> str:
        stamps = [_FileStamp.of(path) for path in paths]
        key = [stamp.encoded() for stamp in stamps]
        cache = self.folder / DIGEST_CACHE_NAME
        known = _cached_digest(cache, key)
        if known is not None:
            return known
        digest = _content_digest(paths, stamps)
        # A read-only folder only costs the hash again at the next start.
        with contextlib.suppress(OSError):
            partial = cache.with_suffix(".partial")
            partial.write_text(json.dumps({"files": key, "sha256": digest}), encoding="utf-8")
            partial.replace(cache)
        return digest

    def _source(self, name: str) -> Any:
        """The open file that holds a tensor. Raises CheckpointInvalid."""
        source = self._files.get(name)
        if source is None:
            raise CheckpointInvalid(
                f"{self.folder}: the weight files lack the tensor {name}; download the model again"
            )
        return source

    def _check_shape(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            raise CheckpointInvalid(
                f"{self.folder}: the tensor {name} has shape {found}, "
                f"{CONFIG_NAME} implies {shape}; the files do not belong together"
            )

    def _open(self, path: Path, weight_map: Mapping[str, str]) -> None:
        try:
            handle = self._stack.enter_context(safe_open(utf8_path(path), framework="pt"))
            names: Iterable[str] = handle.keys()
        except (SafetensorError, OSError) as error:
            raise CheckpointInvalid(
                f"{path} cannot be read as safetensors ({error}); "
                "remove it and download the model again"
            ) from error
        for name in names:
            if name in self._files:
                raise CheckpointInvalid(f"{path}: the tensor {name} is in two weight files")
            if weight_map.get(name, path.name) != path.name:
                raise CheckpointInvalid(
                    f"{path}: the tensor {name} is here, and {INDEX_NAME} says that it is in "
                    f"{weight_map[name]}; download the model again"
                )
            self._files[name] = handle

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file in sorted(weight_map.items()):
            if name not in self._files:
                raise CheckpointInvalid(
                    f"{self.folder / file} lacks the tensor {name}, which {INDEX_NAME} says is in "
                    "it; download the model again"
                )


def _cached_digest(cache: Path, key: list[list[str | int]]) -> str | None:
    try:
        value = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or value.get("files") != key:
        return None
    digest = value.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _content_digest(paths: list[Path], stamps: list[_FileStamp]) -> str:
    total = hashlib.sha256()
    for path, stamp in zip(paths, stamps, strict=True):
        total.update(f"{stamp.name}\0{stamp.size}\0".encode())
        for chunk in _chunks(path):
            total.update(chunk)
    return total.hexdigest()


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as stream:
        while chunk := stream.read(_HASH_CHUNK_BYTES):
            yield chunk
