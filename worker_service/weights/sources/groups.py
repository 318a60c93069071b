"""Process groups that a worker joins for one update."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from worker_service.domain.errors import GroupLost, SourceLost
from worker_service.domain.rendezvous import Rendezvous
from worker_service.domain.weights import DistributedSource
from worker_service.parallel.links import Link
from worker_service.parallel.store import connect, first_line, local_address
from worker_service.weights.sources.interface import Check

# Where in the group's store the one who broadcasts says how large its buckets are.
ANNOUNCEMENT = "buckets"
_POLL_SECONDS = 0.01
# Gloo can't be interrupted: what was abandoned ends by itself this long after the worker gave up.
_GRACE = timedelta(seconds=1)


class PolledStore(Store):
    """A store whose waits can be ended; torch's own wait in C++ until all have come."""

    def __init__(self, store: Store, deadline: float, check: Check) -> None:
        super().__init__()
        self._store = store
        self._deadline = deadline
        self._check = check

    def set(self, key: str, value: Any) -> None:
        """See Store."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """See Store."""
        self.wait([key])
        found: bytes = self._store.get(key)
        return found

    def add(self, key: str, amount: int) -> int:
        """See Store."""
        return int(self._store.add(key, amount))

    def has_extended_api(self) -> bool:
        """See Store."""
        return False

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """See Store. Raises SourceLost after the deadline, or what `check` raises."""
        while not self._store.check(list(keys)):
            self._check()
            if time.monotonic() > self._deadline:
                raise SourceLost(
                    "not all members of the group came in time; the one who broadcasts "
                    "also has to say how large its buckets are"
                )
            time.sleep(_POLL_SECONDS)


@contextmanager
def joined(
    source: DistributedSource, device: torch.device, sizes: Sequence[int], check: Check
) -> Iterator[Link]:
    """The group of an update, once the source's buckets have these sizes; it is left at the end.
    `check` raises what ends the wait for the others. Raises SourceLost."""
    where = Rendezvous(0, source.host, source.port, source.key, source.timeout_seconds)
    deadline = time.monotonic() + source.timeout_seconds
    try:
        store = connect(where, deadline, check)
        polled = PolledStore(PrefixStore(source.key, store), deadline, check)
        _require_sizes(source, polled, sizes)
        link = Link(_group(source, polled, PrefixStore(source.key, store), device))
    except (GroupLost, RuntimeError, OSError) as error:
        raise SourceLost(f"the group can't be joined: {first_line(error)}") from error
    try:
        yield link
    except BaseException:
        if device.type == "cuda":
            link.abort()
        raise
    finally:
        link.close()


def _require_sizes(source: DistributedSource, store: PolledStore, sizes: Sequence[int]) -> None:
    """Raises SourceLost where the source is about to broadcast other buckets: Gloo would end the
    process at a bucket that is larger than expected, and take a smaller one for whole."""
    announced = store.get(ANNOUNCEMENT)
    if announced != ",".join(map(str, sizes)).encode():
        raise SourceLost(
            f"rank {source.source_rank} broadcasts other buckets than those that the update "
            f"describes, which are {len(sizes)} of {sum(sizes)} bytes in all"
        )


def _group(
    source: DistributedSource, polled: PolledStore, store: Store, device: torch.device
) -> Any:
    timeout = timedelta(seconds=source.timeout_seconds) + _GRACE
    if device.type == "cuda":
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        store.set_timeout(timeout)
        nccl = dist.ProcessGroupNCCL(store, source.rank, source.world_size, options)
        nccl.eager_connect_single_device(device)
        return nccl
    gloo: Any = dist.ProcessGroupGloo
    address = local_address(Rendezvous(0, source.host, source.port, source.key))
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 1
    options._devices = [gloo.create_device(hostname=address)]
    return gloo(polled, source.rank, source.world_size, options)
