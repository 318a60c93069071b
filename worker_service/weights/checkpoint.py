"""A Hugging Face model folder: config.json and safetensors files, read through a memory map.

Knows files and tensor names, nothing of what they mean; never writes but a small digest cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from worker_service.load_errors import CheckpointInvalid

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
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
        if not folder.is_dir():
            raise CheckpointInvalid(
                f"{folder} is not a folder; give the folder that holds {CONFIG_NAME}"
            )
        self.folder = folder
        self.config: dict[str, Any] = _read_json(folder / CONFIG_NAME)
        self.weight_files = _weight_files(folder)
        self._stack = contextlib.ExitStack()
        self._files: dict[str, Any] = {}
        try:
            for path in self.weight_files:
                self._open(path)
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
        source = self._files.get(name)
        if source is None:
            raise CheckpointInvalid(
                f"{self.folder}: the weight files lack the tensor {name}; download the model again"
            )
        tensor = source.get_tensor(name)
        assert isinstance(tensor, torch.Tensor)
        if tuple(tensor.shape) != shape:
            raise CheckpointInvalid(
                f"{self.folder}: the tensor {name} has shape {tuple(tensor.shape)}, "
                f"{CONFIG_NAME} implies {shape}; the files do not belong together"
            )
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
        paths = [self.folder / CONFIG_NAME, *self.weight_files]
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

    def _open(self, path: Path) -> None:
        try:
            # safetensors itself reports a file without read permission as missing.
            path.open("rb").close()
            handle = self._stack.enter_context(safe_open(str(path), framework="pt"))
            names: Iterable[str] = handle.keys()
        except PermissionError as error:
            raise CheckpointInvalid(
                f"{path} cannot be read: this user has no permission"
            ) from error
        except (SafetensorError, OSError) as error:
            raise CheckpointInvalid(
                f"{path} cannot be read as safetensors ({error}); download the model again"
            ) from error
        for name in names:
            if name in self._files:
                raise CheckpointInvalid(f"{path}: the tensor {name} is in two weight files")
            self._files[name] = handle


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointInvalid(
            f"{path} is missing; is this a Hugging Face model folder?"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(f"{path} cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointInvalid(f"{path} must hold a JSON object")
    return value


def _weight_files(folder: Path) -> tuple[Path, ...]:
    """The files that hold the weights, by the index when there is one, in order of name."""
    index = folder / INDEX_NAME
    if not index.exists():
        single = folder / SINGLE_NAME
        if not single.is_file():
            raise CheckpointInvalid(
                f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}; only safetensors weights "
                "are read, convert other formats first"
            )
        return (single,)
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointInvalid(f"{index} has no weight_map")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name:
            raise CheckpointInvalid(f"{index} names {name!r}, which is not a file of this folder")
        if not (folder / name).is_file():
            raise CheckpointInvalid(f"{folder / name} is missing; download the model again")
    return tuple(folder / name for name in names)


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
