"""Tensors in shared memory, and members of a group that broadcast, for tests of updates."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from tests.support.weight_updates import Tensors, described
from worker_service.domain.weights import (
    DistributedSource,
    GroupBackend,
    IpcSource,
    PosixMemory,
    WeightsUpdate,
)
from worker_service.weights.sources.distributed import buckets_of
from worker_service.weights.sources.groups import ANNOUNCEMENT
from worker_service.weights.sources.interface import bytes_of


@contextmanager
def shared(tensors: Tensors, gap: int = 0) -> Iterator[IpcSource]:
    """The tensors in shared memory, each `gap` bytes and its alignment behind the one before."""
    offsets, end = [], 0
    for tensor in tensors.values():
        end = -(-(end + gap) // 8) * 8
        offsets.append(end)
        end += tensor.nbytes
    memory = SharedMemory(create=True, size=max(end, 1))
    try:
        for offset, tensor in zip(offsets, tensors.values(), strict=True):
            memory.buf[offset : offset + tensor.nbytes] = bytes_of(tensor).data
        name = PosixMemory(f"/{memory.name.removeprefix('/')}")
        yield IpcSource(name, max(end, 1), described(tensors), tuple(offsets))
    finally:
        memory.close()
        memory.unlink()


class Trainer:
    """Member 0 of groups of two, whose store it hosts. Each `broadcast` is a group of its own."""

    def __init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.errors: list[Exception] = []
        self._groups = 0

    def source(self, tensors: Tensors, **changes: Any) -> DistributedSource:
        """How the other member gets them, in a group that has not been."""
        self._groups += 1
        fields: dict[str, Any] = {
            "host": "127.0.0.1",
            "port": self.store.port,
            "world_size": 2,
            "rank": 1,
            "source_rank": 0,
            "backend": GroupBackend.GLOO,
            "key": f"group:{self._groups}",
            "tensors": described(tensors),
            "timeout_seconds": 30.0,
        }
        return DistributedSource(**(fields | changes))

    def start(
        self,
        source: DistributedSource,
        tensors: Tensors,
        change: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = lambda buckets: buckets,
        *,
        announced: str = "",
        until: threading.Event | None = None,
    ) -> threading.Thread:
        """Broadcasts on a thread: the buckets as `change` leaves them, once it has `announced` or
        what is right. Then it waits for `until`,
        and leaves."""

        def run() -> None:
            try:
                # A connection of its own: one that waits lets nobody else on it.
                own = TCPStore(
                    "127.0.0.1", self.store.port, is_master=False, wait_for_workers=False
                )
                store = PrefixStore(source.key, own)
                sizes = [
                    bucket.byte_count for bucket in buckets_of(source.tensors, source.bucket_bytes)
                ]
                store.set(ANNOUNCEMENT, announced or ",".join(map(str, sizes)))
                group = join(store)
                for bucket in change(_buckets(source, tensors)):
                    options = dist.BroadcastOptions()
                    options.rootRank = 0
                    group.broadcast([bucket], options).wait()
                if until is not None:
                    until.wait(30)
            except Exception as error:
                self.errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def join(store: PrefixStore, rank: int = 0, size: int = 2) -> Any:
    """A group of Gloo, as torch makes it for anybody."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=20)
    options._threads = 1
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    return gloo(store, rank, size, options)


def _buckets(source: DistributedSource, tensors: Tensors) -> list[torch.Tensor]:
    parts = [torch.from_numpy(bytes_of(tensor).copy()) for tensor in tensors.values()]
    buckets = buckets_of(source.tensors, source.bucket_bytes)
    return [torch.cat([parts[index] for index in bucket.indices]) for bucket in buckets]


def update_from(source: DistributedSource | IpcSource, **changes: Any) -> WeightsUpdate:
    """An update from there."""
    return WeightsUpdate("u", source, **changes)
