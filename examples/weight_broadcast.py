"""Gives weights to workers by broadcast: what a trainer copies, or imports, beside torch.

The workers' side is DistributedSource in protos/twinplane/worker/v1/weights.proto.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

ANNOUNCEMENT = "buckets"
"""Where in the group's store the one who broadcasts says how large its buckets are."""


def broadcast(
    tensors: Mapping[str, torch.Tensor],
    store: Store,
    key: str,
    *,
    world_size: int = 2,
    bucket_bytes: int = 0,
    timeout: timedelta = timedelta(minutes=1),
    address: str = "127.0.0.1",
) -> None:
    """Broadcasts tensors in host memory, as rank 0 of a group of its own over Gloo, and leaves it.

    `store` is a TCPStore that this process hosts. `key` is new for each update, and so are the
    workers' ranks 1 to `world_size` - 1 in it. `address` is where the workers reach this host.
    Blocks until every worker has all. Raises RuntimeError where one is lost or does not come.
    """
    named = PrefixStore(key, store)
    parts = [
        tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()
    ]
    sizes = bucket_sizes([part.numel() for part in parts], bucket_bytes)
    named.set(ANNOUNCEMENT, ",".join(map(str, sizes)))
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [gloo.create_device(hostname=address)]
    group = gloo(named, 0, world_size, options)
    how = dist.BroadcastOptions()
    how.rootRank = 0
    for bucket in _buckets(parts, sizes):
        group.broadcast([bucket], how).wait()


def bucket_sizes(sizes: Sequence[int], bucket_bytes: int) -> list[int]:
    """How many bytes each bucket has: as many whole tensors as fit, or one that is larger."""
    buckets: list[int] = []
    for size in sizes:
        if buckets and buckets[-1] + size <= bucket_bytes:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets


def _buckets(parts: Sequence[torch.Tensor], sizes: Sequence[int]) -> Iterator[torch.Tensor]:
    """The buckets' bytes. A bucket of one tensor is that tensor's memory, not a copy."""
    rest = iter(parts)
    for size in sizes:
        bucket = [next(rest)]
        while sum(part.numel() for part in bucket) < size:
            bucket.append(next(rest))
        yield bucket[0] if len(bucket) == 1 else torch.cat(bucket)
