"""The order of a stream's chunks, and the digests of what they make up. No torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from worker_service.domain.errors import SourceLost, UpdateInvalid
from worker_service.domain.weights import TensorChunk, TensorDescription

FIELD = "update.stream.tensors"


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where the bytes of a chunk belong."""

    tensor_index: int
    start: int
    end: int


class ChunkOrder:
    """Takes chunks tensor by tensor, and within one from its first byte to its last.

    A tensor is digested while it comes, so that its bytes are read while they are in the
    processor's cache.
    """

    def __init__(self, tensors: Sequence[TensorDescription]) -> None:
        self._tensors = tensors
        self._digests: list[bytes] = []
        self._hash = hashlib.sha256()
        self._filled = 0

    def take(self, chunk: TensorChunk) -> ChunkPlace:
        """Raises UpdateInvalid for a chunk that is not the next one, or that makes a tensor whole
        whose digest is another than was said."""
        self._pass_empty()
        index = len(self._digests)
        if index == len(self._tensors):
            raise UpdateInvalid("chunk.tensor_index", "every tensor is whole already")
        tensor = self._tensors[index]
        if chunk.tensor_index != index:
            raise UpdateInvalid(
                "chunk.tensor_index",
                f"{chunk.tensor_index} came where {index} is next, the tensor {tensor.name}",
            )
        if chunk.offset != self._filled:
            raise UpdateInvalid(
                "chunk.offset",
                f"{chunk.offset} came where {self._filled} is next in the tensor {tensor.name}",
            )
        start, end = self._filled, self._filled + len(chunk.data)
        if not chunk.data:
            raise UpdateInvalid("chunk.data", f"is empty, in the tensor {tensor.name}")
        if end > tensor.byte_count:
            raise UpdateInvalid(
                "chunk.data",
                f"reaches to byte {end} of the tensor {tensor.name}, which has {tensor.byte_count}",
            )
        self._hash.update(chunk.data)
        self._filled = end
        if end == tensor.byte_count:
            digest = self._hash.digest()
            require_digest(f"{FIELD}[{index}].sha256", tensor, digest)
            self._digests.append(digest)
            self._hash, self._filled = hashlib.sha256(), 0
        return ChunkPlace(index, start, end)

    def finish(self) -> dict[str, TensorDescription]:
        """The tensors with their digests. Raises SourceLost where one is not whole."""
        self._pass_empty()
        index = len(self._digests)
        if index < len(self._tensors):
            tensor = self._tensors[index]
            raise SourceLost(
                f"the stream ended at byte {self._filled} of the tensor {tensor.name}, which has "
                f"{tensor.byte_count}; {len(self._tensors) - index - 1} more were to come"
            )
        pairs = zip(self._tensors, self._digests, strict=True)
        return {tensor.name: replace(tensor, sha256=digest) for tensor, digest in pairs}

    def _pass_empty(self) -> None:
        """A tensor without numbers has no chunks: it is whole when its turn comes."""
        while (index := len(self._digests)) < len(self._tensors):
            tensor = self._tensors[index]
            if tensor.byte_count:
                return
            digest = hashlib.sha256().digest()
            require_digest(f"{FIELD}[{index}].sha256", tensor, digest)
            self._digests.append(digest)


def require_digest(field_path: str, tensor: TensorDescription, found: bytes) -> None:
    """Raises UpdateInvalid where a tensor's bytes have another digest than was said."""
    if tensor.sha256 and tensor.sha256 != found:
        raise UpdateInvalid(
            field_path,
            f"the bytes of the tensor {tensor.name} have the SHA-256 {found.hex()}, "
            f"not {tensor.sha256.hex()}",
        )
