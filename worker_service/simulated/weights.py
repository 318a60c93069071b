"""The simulated worker's weights: any files or tensors, of which only the digests are kept.

Tokens depend on the version, so that one of a wrong version shows. The weights of the start have
salt 0.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, assert_never

from worker_service.domain.errors import SourceLost, UpdateInvalid
from worker_service.domain.plan import WeightVersion
from worker_service.domain.weights import (
    DiskSource,
    DistributedSource,
    IpcSource,
    Placement,
    PreparedWeights,
    StreamSource,
    Target,
    TensorChunk,
    TensorDescription,
    WeightsUpdate,
)
from worker_service.runner.interface import PreparationCancelled
from worker_service.weights.chunks import ChunkOrder
from worker_service.weights.content import content_digest
from worker_service.weights.paths import FIELD as DISK_FIELD
from worker_service.weights.paths import allowed_path

_CHUNK_BYTES = 1 << 22


def salt_of(digest: str) -> int:
    """What a version other than the first mixes into the KV."""
    return int(digest[:16], 16)


class SimulatedWeights:
    """What is live. Made with the digest of the weights of the start."""

    def __init__(self, digest: str, root: Path | None) -> None:
        self.version = WeightVersion(1, digest)
        self.tensors: Mapping[str, TensorDescription] = {}
        self.salt = 0
        self.prepared: SimulatedPrepared | None = None
        self.root = root
        self._first_digest = digest

    def begin(
        self, update: WeightsUpdate, is_cancelled: Callable[[], bool]
    ) -> SimulatedPreparation:
        """See Updatable."""
        return SimulatedPreparation(self, update, is_cancelled)

    def commit(self, prepared: SimulatedPrepared) -> WeightVersion:
        """See Updatable."""
        self.prepared = None
        self.tensors = prepared.tensors
        digest = prepared.facts.digest
        self.salt = 0 if digest == self._first_digest else salt_of(digest)
        self.version = WeightVersion(self.version.generation + 1, digest)
        return self.version


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedPrepared:
    """interface.Prepared."""

    facts: PreparedWeights
    tensors: Mapping[str, TensorDescription]
    weights: SimulatedWeights

    def drop(self) -> None:
        """See Prepared."""
        if self.weights.prepared is self:
            self.weights.prepared = None


class SimulatedPreparation:
    """interface.Preparation."""

    def __init__(
        self, weights: SimulatedWeights, update: WeightsUpdate, is_cancelled: Callable[[], bool]
    ) -> None:
        self._weights = weights
        self._update = update
        self._is_cancelled = is_cancelled
        self._order: ChunkOrder | None = None
        self._folder: Path | None = None
        if update.target is not Target.MODEL:
            raise UpdateInvalid("update.target", "this worker has no draft model")
        source = update.source
        match source:
            case DiskSource(path=path):
                self._folder = allowed_path(path, weights.root)
            case StreamSource(tensors=tensors):
                self._order = ChunkOrder(tensors)
            case DistributedSource():
                raise UpdateInvalid("update.distributed", "a simulated worker joins no group")
            case IpcSource():
                raise UpdateInvalid("update.ipc", "a simulated worker shares no memory")
            case _:
                assert_never(source)

    def put(self, chunk: TensorChunk) -> None:
        """See Preparation."""
        if self._order is None:
            raise UpdateInvalid("chunk", "only weights from a stream have chunks")
        self._order.take(chunk)

    def finish(self) -> SimulatedPrepared:
        """See Preparation."""
        if self._order is not None:
            fresh = self._order.finish()
        else:
            assert self._folder is not None
            fresh = {each.name: each for each in self._read(self._folder)}
        tensors = {**self._weights.tensors, **fresh} if self._update.is_partial else fresh
        digest = content_digest(b"", tensors.values())
        expected = self._update.expected_digest
        if expected and expected != digest:
            raise UpdateInvalid("update.expected_digest", f"the weights have the digest {digest}")
        placement = self._update.placement
        if placement is Placement.AUTO:
            placement = Placement.BESIDE
        facts = PreparedWeights(self._update.update_id, digest, placement, 0, 0)
        self._weights.prepared = SimulatedPrepared(facts, tensors, self._weights)
        return self._weights.prepared

    def close(self) -> None:
        """See Preparation."""
        self._weights.prepared = None

    def _read(self, path: Path) -> Iterator[TensorDescription]:
        """The tensors of the safetensors files; where there are none, each file as if it were a
        tensor."""
        files = [path]
        if path.is_dir():
            files = sorted(each for each in path.iterdir() if not each.name.startswith("."))
            files = [each for each in files if each.suffix == ".safetensors"] or files
        try:
            for file in files:
                if file.suffix == ".safetensors":
                    yield from self._tensors(file)
                elif file.is_file():
                    size = file.stat().st_size
                    description = TensorDescription(file.name, "U8", (size,))
                    yield replace(description, sha256=self._digest(file, 0, size))
        except OSError as error:
            raise SourceLost(f"{path} can't be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UpdateInvalid(DISK_FIELD, f"{path} is no safetensors file") from error

    def _tensors(self, file: Path) -> Iterator[TensorDescription]:
        with file.open("rb") as stream:
            header_bytes = int.from_bytes(stream.read(8), "little")
            header: dict[str, Any] = json.loads(stream.read(min(header_bytes, 100 << 20)))
        for name, each in header.items():
            if name != "__metadata__":
                start, end = each["data_offsets"]
                digest = self._digest(file, 8 + header_bytes + start, end - start)
                yield TensorDescription(name, each["dtype"], tuple(each["shape"]), digest)

    def _digest(self, file: Path, start: int, size: int) -> bytes:
        total = hashlib.sha256()
        with file.open("rb") as stream:
            stream.seek(start)
            while size > 0 and (data := stream.read(min(size, _CHUNK_BYTES))):
                if self._is_cancelled():
                    raise PreparationCancelled
                total.update(data)
                size -= len(data)
        if size > 0:
            raise ValueError("the file ends early")
        return total.digest()
