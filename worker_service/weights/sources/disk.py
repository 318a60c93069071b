"""Weights in files below the folder that the worker's operator allows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

from twinplane import models
from worker_service.domain.errors import UpdateInvalid
from worker_service.domain.weights import TensorChunk
from worker_service.weights.checkpoint import Checkpoint
from worker_service.weights.sources.interface import Check, TensorSource


class DiskReceiver:
    """Receiver of a folder or a GGUF file at a path that is allowed."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, chunk: TensorChunk) -> None:
        """See Receiver."""
        raise UpdateInvalid("chunk", "only weights from a stream have chunks")

    def receive(self, check: Check) -> AbstractContextManager[TensorSource]:
        """See Receiver. Converts a GGUF file first. Raises ModelError and LoadError, too."""
        check()
        folder = models.resolve(str(self._path))
        check()
        return Checkpoint(folder, mapped=False)
