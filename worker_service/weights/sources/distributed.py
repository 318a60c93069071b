"""Tensors that a member of a torch.distributed group broadcasts, in buckets."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from worker_service.domain.errors import GroupLost, SourceLost, UpdateInvalid
from worker_service.domain.weights import (
    DistributedSource,
    GroupBackend,
    TensorChunk,
    TensorDescription,
)
from worker_service.parallel.links import Link
from worker_service.parallel.store import first_line
from worker_service.weights.digests import TensorDigests
from worker_service.weights.sources.groups import joined
from worker_service.weights.sources.interface import DTYPES, Check, TensorSource
from worker_service.weights.sources.kept import KeptTensors

FIELD = "update.distributed.tensors"
# While one bucket is digested and copied, the next is on its way already.
_IN_FLIGHT = 2
_LOOK_SECONDS = 0.02
# Gloo takes fewer bytes than were expected for a whole message. So each bucket ends in drawn bytes
# before it comes; where they are still there, it came short.
_MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors `indices` of a source, whose bytes follow one another."""

    indices: range
    byte_count: int

    @property
    def is_staged(self) -> bool:
        """Whether it is received into memory of its own; one tensor is received where it stays."""
        return len(self.indices) > 1


class DistributedReceiver:
    """Receiver of broadcasts. The tensors fit the model and the memory; it is taken here."""

    def __init__(self, source: DistributedSource, device: torch.device) -> None:
        self._source = source
        self._device = device if source.backend is GroupBackend.NCCL else torch.device("cpu")
        self._tensors = [
            torch.empty(each.shape, dtype=DTYPES[each.number_format]) for each in source.tensors
        ]

    def put(self, chunk: TensorChunk) -> None:
        """See Receiver."""
        raise UpdateInvalid("chunk", "only weights from a stream have chunks")

    @contextmanager
    def receive(self, check: Check) -> Iterator[TensorSource]:
        """See Receiver. The group is left when it returns or raises."""
        digests = self._digested(check)
        names = [each.name for each in self._source.tensors]
        yield KeptTensors("the broadcast", dict(zip(names, self._tensors, strict=True)), digests)

    def _digested(self, check: Check) -> dict[str, bytes]:
        tensors = self._source.tensors
        sizes = [bucket.byte_count for bucket in self._buckets()]
        with TensorDigests(tensors, lambda index: f"{FIELD}[{index}].sha256") as digests:
            with joined(self._source, self._device, sizes, check) as link:
                for index in self._received(link, check):
                    digests.add(self._tensors[index])
            return digests.finish(check)

    def _received(self, link: Link, check: Check) -> Iterator[int]:
        """The index of each tensor that is whole, in order."""
        buckets = deque(self._buckets())
        running: deque[tuple[Bucket, torch.Tensor, torch.Tensor, Any]] = deque()
        while buckets or running:
            while buckets and len(running) < _IN_FLIGHT:
                bucket = buckets.popleft()
                memory = self._memory(bucket)
                mark = _marked(memory)
                running.append((bucket, memory, mark, self._start(link, memory)))
            bucket, memory, mark, work = running.popleft()
            self._wait(work, bucket, check)
            if torch.equal(memory[-_MARK_BYTES:], mark):
                raise self._lost(f"fewer bytes came than the {bucket.byte_count} of a bucket")
            self._spread(bucket, memory)
            yield from bucket.indices

    def _buckets(self) -> list[Bucket]:
        return buckets_of(self._source.tensors, self._source.bucket_bytes)

    def _memory(self, bucket: Bucket) -> torch.Tensor:
        """Bytes into which a bucket is received."""
        if bucket.is_staged or self._device.type != "cpu":
            return torch.empty(bucket.byte_count, dtype=torch.uint8, device=self._device)
        return _flat(self._tensors[bucket.indices.start])

    def _spread(self, bucket: Bucket, memory: torch.Tensor) -> None:
        """Copies a bucket's bytes to where they stay, unless they are there."""
        if not bucket.is_staged and self._device.type == "cpu":
            return
        start = 0
        for index in bucket.indices:
            tensor = _flat(self._tensors[index])
            tensor.copy_(memory[start : start + tensor.numel()])
            start += tensor.numel()

    def _start(self, link: Link, memory: torch.Tensor) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank = self._source.source_rank
        try:
            return link.start(lambda group: group.broadcast([memory], options))
        except (GroupLost, RuntimeError) as error:
            raise self._lost(first_line(error)) from error

    def _wait(self, work: Any, bucket: Bucket, check: Check) -> None:
        """Raises SourceLost where the bucket does not come in time."""
        deadline = time.monotonic() + self._source.timeout_seconds
        while not work.is_completed():
            check()
            if time.monotonic() > deadline:
                first = self._source.tensors[bucket.indices.start].name
                raise self._lost(
                    f"no bucket came for {self._source.timeout_seconds:g} seconds; "
                    f"that of {first} is next"
                )
            if self._device.type == "cpu":
                with suppress(RuntimeError):  # it takes longer; or it failed, which is told below
                    work.wait(timedelta(seconds=_LOOK_SECONDS))
            else:  # NCCL would abort the group after such a wait
                time.sleep(_LOOK_SECONDS / 10)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._lost(first_line(error)) from error

    def _lost(self, reason: str) -> SourceLost:
        return SourceLost(f"rank {self._source.source_rank}, which broadcasts: {reason}")


def require_backend(source: DistributedSource, device: torch.device) -> None:
    """Raises UpdateInvalid for a group that this worker can't be in."""
    if source.backend is GroupBackend.NCCL and device.type != "cuda":
        raise UpdateInvalid(
            "update.distributed.backend", f"NCCL needs a GPU; this worker is on {device.type}"
        )


def buckets_of(tensors: Sequence[TensorDescription], bucket_bytes: int) -> list[Bucket]:
    """How tensors travel: see DistributedSource.bucket_bytes in the contract."""
    buckets: list[Bucket] = []
    start = size = 0
    for index, tensor in enumerate(tensors):
        if index > start and size + tensor.byte_count > bucket_bytes:
            buckets.append(Bucket(range(start, index), size))
            start, size = index, 0
        size += tensor.byte_count
    if start < len(tensors):
        buckets.append(Bucket(range(start, len(tensors)), size))
    return buckets


def staged_bytes(buckets: Sequence[Bucket]) -> int:
    """What buckets take of the host at a time, beside their tensors."""
    sizes = sorted(each.byte_count for each in buckets if each.is_staged)
    return sum(sizes[-_IN_FLIGHT:])


def _marked(memory: torch.Tensor) -> torch.Tensor:
    """The bytes in which it ends now."""
    drawn = bytearray(os.urandom(min(_MARK_BYTES, memory.numel())))
    mark = torch.frombuffer(drawn, dtype=torch.uint8).to(memory.device)
    memory[-_MARK_BYTES:] = mark
    return mark


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
