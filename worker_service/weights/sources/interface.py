"""What a loader reads tensors from, and how an update's tensors come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from worker_service.domain.weights import TensorChunk, TensorDescription

Check = Callable[[], None]
"""Called between pieces of long work; raises what is to end it."""

FORMATS: Mapping[torch.dtype, str] = MappingProxyType(
    {
        torch.float32: "F32",
        torch.bfloat16: "BF16",
        torch.float16: "F16",
        torch.float64: "F64",
    }
)
"""safetensors' names for the formats that are read."""
DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: each for each, name in FORMATS.items()})


class TensorSource(Protocol):
    """Tensors by name, in the formats that they are stored in.

    `origin` says where they are, for messages: a folder, or words such as "the stream". Every
    method raises CheckpointInvalid for a tensor that is not there.
    """

    origin: str

    def names(self) -> frozenset[str]:
        """Every tensor's name."""
        ...

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor in its stored dtype, not copied. Raises CheckpointInvalid for another
        shape."""
        ...

    def part(self, name: str, shape: tuple[int, ...], axis: int, part: range) -> torch.Tensor:
        """Part of the tensor, along the first or second axis. Raises CheckpointInvalid where the
        whole has another shape than `shape`."""
        ...

    def stored_format(self, name: str) -> str:
        """The format as safetensors writes it: F32, BF16, I8 …"""
        ...

    def describe(self, names: Iterable[str], check: Check) -> dict[str, TensorDescription]:
        """What the tensors are, with their digests. May read all of them; `check` is called
        between two."""
        ...


class Receiver(Protocol):
    """Takes in what an update brings. Made after all that the description shows was checked.

    Used on the thread that prepares weights. Dropping it frees what it holds.
    """

    def put(self, chunk: TensorChunk) -> None:
        """Takes bytes of a stream. Raises UpdateInvalid for a chunk that is not the next one."""
        ...

    def receive(self, check: Check) -> AbstractContextManager[TensorSource]:
        """The tensors, once all have come and their digests are right. Raises UpdateInvalid or
        SourceLost."""
        ...


def bytes_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A contiguous tensor's bytes on the host, not copied."""
    data: npt.NDArray[np.uint8] = tensor.reshape(-1).view(torch.uint8).numpy()
    return data


def no_check() -> None:
    """A Check that never ends anything."""
