"""SHA-256 of whole tensors, on threads beside those that receive them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from types import TracebackType
from typing import Self

import torch

from worker_service.domain.weights import TensorDescription
from worker_service.weights.chunks import require_digest
from worker_service.weights.sources.interface import Check, bytes_of

_MAX_THREADS = 2
_LOOK_SECONDS = 0.02


class TensorDigests:
    """Digests tensors in the order in which they are added. `field_of` names the field of the
    tensor at an index. A context: when it ends, nothing is read any more."""

    def __init__(
        self, tensors: Sequence[TensorDescription], field_of: Callable[[int], str]
    ) -> None:
        self._tensors = tensors
        self._field_of = field_of
        self._found: list[Future[bytes]] = []
        threads = min(_MAX_THREADS, max(1, len(os.sched_getaffinity(0)) - 1))
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="digests")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def add(self, tensor: torch.Tensor) -> None:
        """The next one, contiguous and on the host; it may not change any more."""
        self._found.append(self._pool.submit(_sha256, tensor))

    def finish(self, check: Check) -> dict[str, bytes]:
        """The digests by name, once all were added. Raises UpdateInvalid for one that is not what
        the description says."""
        digests = {}
        for index, tensor in enumerate(self._tensors):
            digest = _result(self._found[index], check)
            require_digest(self._field_of(index), tensor, digest)
            digests[tensor.name] = digest
        return digests


def _sha256(tensor: torch.Tensor) -> bytes:
    return hashlib.sha256(bytes_of(tensor).data).digest()


def _result(future: Future[bytes], check: Check) -> bytes:
    while True:
        check()
        try:
            return future.result(_LOOK_SECONDS)
        except NotYet:
            continue
