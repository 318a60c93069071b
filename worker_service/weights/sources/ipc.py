"""Tensors in memory that another process of this host shares, copied out of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import numpy as np
import torch

from worker_service.domain.errors import UpdateInvalid
from worker_service.domain.weights import (
    NUMBER_BYTES,
    CudaMemory,
    IpcSource,
    PosixMemory,
    TensorChunk,
    TensorDescription,
)
from worker_service.weights.digests import TensorDigests
from worker_service.weights.sources import cuda_memory, posix_memory
from worker_service.weights.sources.interface import DTYPES, Check, TensorSource
from worker_service.weights.sources.kept import KeptTensors

FIELD = "update.ipc.tensors"


class SharedMemory(Protocol):
    """Memory of another process."""

    def read(self, offset: int, into: torch.Tensor, check: Check) -> None:
        """Copies bytes from there into a contiguous tensor on the host. Raises SourceLost."""
        ...


class IpcReceiver:
    """Receiver of shared memory. The tensors fit the model and the memory; it is taken here."""

    def __init__(self, source: IpcSource, device: torch.device) -> None:
        """Raises UpdateInvalid where the memory is not what the source says."""
        self._source = source
        self._device = device
        with _opened(source, device):
            pass
        self._tensors = {each.name: _taken(each) for each in source.tensors}

    def put(self, chunk: TensorChunk) -> None:
        """See Receiver."""
        raise UpdateInvalid("chunk", "only weights from a stream have chunks")

    @contextmanager
    def receive(self, check: Check) -> Iterator[TensorSource]:
        """See Receiver. Copies all before anything is used."""
        yield KeptTensors("the shared memory", self._tensors, self._copy(check))

    def _copy(self, check: Check) -> dict[str, bytes]:
        tensors = self._source.tensors
        with (
            TensorDigests(tensors, lambda index: f"{FIELD}[{index}].tensor.sha256") as digests,
            _opened(self._source, self._device) as memory,
        ):
            for offset, tensor in zip(self._source.offsets, self._tensors.values(), strict=True):
                memory.read(offset, tensor, check)
                digests.add(tensor)
            return digests.finish(check)


def _taken(tensor: TensorDescription) -> torch.Tensor:
    """Memory for it. numpy's, unlike torch's, is in huge pages where it is large, so that a read
    into it stops for far fewer page faults: measured, it is twice as fast or more."""
    data = torch.from_numpy(np.empty(tensor.byte_count, np.uint8))
    return data.view(DTYPES[tensor.number_format]).reshape(tensor.shape)


def require_layout(source: IpcSource) -> None:
    """Raises UpdateInvalid for a tensor that is not whole in the memory, not aligned to its
    numbers, or over another. The formats are known."""
    previous: tuple[int, TensorDescription] | None = None
    for index, start, tensor in _by_offset(source.tensors, source.offsets):
        where, size = f"{FIELD}[{index}].offset", NUMBER_BYTES[tensor.number_format]
        if start % size:
            raise UpdateInvalid(
                where, f"{start} of {tensor.name} is no multiple of the {size} bytes of its numbers"
            )
        if start + tensor.byte_count > source.byte_count:
            raise UpdateInvalid(
                where,
                f"the tensor {tensor.name} would end at byte {start + tensor.byte_count} of the "
                f"memory, which has {source.byte_count}",
            )
        if previous is not None and start < previous[0]:
            raise UpdateInvalid(
                where, f"the tensor {tensor.name} is over {previous[1].name} in the memory"
            )
        previous = (start + tensor.byte_count, tensor)


def _by_offset(
    tensors: Sequence[TensorDescription], offsets: Sequence[int]
) -> list[tuple[int, int, TensorDescription]]:
    """Each tensor's index and offset, from the first byte to the last."""
    return sorted(
        (
            (index, offset, tensor)
            for index, (offset, tensor) in enumerate(zip(offsets, tensors, strict=True))
        ),
        key=lambda each: each[1],
    )


def _opened(source: IpcSource, device: torch.device) -> AbstractContextManager[SharedMemory]:
    match source.memory:
        case PosixMemory(name=name):
            return posix_memory.opened(name, source.byte_count)
        case CudaMemory() as memory:
            return cuda_memory.opened(memory, source.byte_count, device)
