"""Writes a safetensors file as a stream: only one piece of a tensor is in memory at a time.

Format: eight bytes of header length (little endian), a JSON header padded with spaces to a
multiple of eight, then the tensors' bytes in header order
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from twinplane.models.progress import Progress

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TensorStream:
    """A float32 tensor to write. Its `pieces` together hold the elements of `shape` in order."""

    name: str
    shape: tuple[int, ...]
    pieces: Iterator[npt.NDArray[np.float32]]

    @property
    def byte_count(self) -> int:
        """Bytes in the file."""
        return 4 * math.prod(self.shape)


def write_safetensors(path: Path, tensors: Sequence[TensorStream], progress: Progress) -> None:
    """Writes `tensors` as float32 and flushes them to the disk. Advances `progress` by bytes."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + tensor.byte_count
        header[tensor.name] = {
            "dtype": "F32",
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)

    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors:
            written = 0
            for piece in tensor.pieces:
                file.write(piece.data)
                written += piece.nbytes
                progress.advance(piece.nbytes)
            assert written == tensor.byte_count, tensor.name
        file.flush()
        os.fsync(file.fileno())
