"""A Hugging Face model folder: config.json and safetensors files, read through a memory map.

Knows files and tensor names, nothing of what they mean; never writes but a small digest cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from twinplane.models.errors import ModelInvalid
from twinplane.models.folder import CONFIG_NAME, INDEX_NAME, open_folder, unreadable
from twinplane.paths import utf8_path
from worker_service.domain.weights import TensorDescription
from worker_service.load_errors import CheckpointInvalid
from worker_service.weights.sources.interface import Check, bytes_of
from worker_service.weights.unmapped import UnmappedFile

DIGEST_CACHE_NAME = ".twinplane-digest.json"
_HEX_DIGEST = re.compile("[0-9a-f]{64}")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class FileStamp:
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
    """TensorSource of an open model folder. A context manager: tensors taken from it outlive it
    only as copies.

    Raises CheckpointInvalid when a file is missing, is not what its name says, or lacks a tensor.
    """

    def __init__(self, folder: Path, *, mapped: bool = True) -> None:
        """Not `mapped`, tensors are copies, and files that are cut off meanwhile do no harm."""
        self._is_mapped = mapped
        try:
            files = open_folder(folder)
        except ModelInvalid as invalid:
            raise CheckpointInvalid(str(invalid)) from invalid
        self.folder = folder
        self.origin = str(folder)
        self.config = files.config
        self.weight_files = files.weight_files
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for path in self.weight_files:
                self._open(path, files.weight_map)
            self._check_index(files.weight_map)
            self.opened = self.stamps()
            """What the weight files were when they were opened."""
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

    def config_bytes(self) -> bytes:
        """The content of config.json."""
        return self._from_system(lambda: (self.folder / CONFIG_NAME).read_bytes())

    def require_unchanged(self) -> None:
        """Raises CheckpointInvalid where the weight files are no longer what they were when they
        were opened."""
        if self.stamps() != self.opened:
            raise CheckpointInvalid(f"{self.folder}: the files were changed while they were read")

    def stamps(self) -> tuple[FileStamp, ...]:
        """What the weight files are now, as far as their metadata shows it."""
        return self._from_system(lambda: tuple(map(FileStamp.of, self.weight_files)))

    def describe(self, names: Iterable[str], check: Check) -> dict[str, TensorDescription]:
        """See TensorSource. The digests are remembered beside the files for as long as the names,
        sizes and times of those stay the same."""
        wanted = sorted(names)
        stamps = [stamp.encoded() for stamp in self.stamps()]
        cache = self.folder / DIGEST_CACHE_NAME
        known = _cached_digests(cache, stamps)
        missing = [name for name in wanted if name not in known]
        for name in missing:
            check()
            tensor = self._source(name).get_tensor(name)
            known[name] = hashlib.sha256(bytes_of(tensor).data).hexdigest()
        if missing:
            # A read-only folder only costs the hash again at the next start.
            with contextlib.suppress(OSError):
                partial = cache.with_suffix(".partial")
                content = {"files": stamps, "tensors": known}
                partial.write_text(json.dumps(content), encoding="utf-8")
                partial.replace(cache)
        return {name: self._description(name, bytes.fromhex(known[name])) for name in wanted}

    def _description(self, name: str, digest: bytes) -> TensorDescription:
        stored = self._source(name).get_slice(name)
        return TensorDescription(name, str(stored.get_dtype()), tuple(stored.get_shape()), digest)

    def _from_system(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except OSError as error:
            path = Path(error.filename or self.folder)
            raise CheckpointInvalid(unreadable(path, error)) from error

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
            with contextlib.ExitStack() as stack:
                handle: Any = stack.enter_context(safe_open(utf8_path(path), framework="pt"))
                if self._is_mapped:
                    self._stack.enter_context(stack.pop_all())
            if not self._is_mapped:
                handle = self._stack.enter_context(UnmappedFile(path))
            names: Iterable[str] = handle.keys()
        except (SafetensorError, OSError, ValueError) as error:
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


def _cached_digests(cache: Path, stamps: list[list[str | int]]) -> dict[str, str]:
    """Hex SHA-256 of tensors by name, as far as they are remembered."""
    try:
        value = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict) or value.get("files") != stamps:
        return {}
    tensors = value.get("tensors")
    if not isinstance(tensors, dict):
        return {}
    return {
        name: digest
        for name, digest in tensors.items()
        if isinstance(digest, str) and _HEX_DIGEST.fullmatch(digest)
    }
