"""Tensors that come as chunks of bytes, in order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from worker_service.domain.weights import TensorChunk, TensorDescription
from worker_service.weights.chunks import ChunkOrder
from worker_service.weights.sources.interface import DTYPES, Check, TensorSource, bytes_of
from worker_service.weights.sources.kept import KeptTensors


class StreamReceiver:
    """Receiver of chunks. `tensors` fit the model, and there is memory for them; it is taken
    here."""

    def __init__(self, tensors: Sequence[TensorDescription]) -> None:
        self._order = ChunkOrder(tensors)
        self._tensors = {
            each.name: torch.empty(each.shape, dtype=DTYPES[each.number_format]) for each in tensors
        }
        self._bytes = [bytes_of(each) for each in self._tensors.values()]

    def put(self, chunk: TensorChunk) -> None:
        """See Receiver."""
        place = self._order.take(chunk)
        data = np.frombuffer(chunk.data, np.uint8)
        self._bytes[place.tensor_index][place.start : place.end] = data

    def receive(self, check: Check) -> AbstractContextManager[TensorSource]:
        """See Receiver."""
        digests = {name: each.sha256 for name, each in self._order.finish().items()}
        return nullcontext(KeptTensors("the stream", self._tensors, digests))
