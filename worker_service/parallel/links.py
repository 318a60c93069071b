"""Whom a rank talks to in one epoch: a process group for each set of ranks that has to.

Process groups are objects of their own here, because torch's default group is a global that lives
as long as the process, and a worker lives through many groups.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from worker_service.domain.capability import RankCoordinates
from worker_service.domain.errors import GroupLost
from worker_service.domain.rendezvous import Rendezvous
from worker_service.parallel.store import first_line, local_address

# A wait for another rank may be as long as that rank's part of a step. Who hangs is found by the
# controller, which knows what a step takes; this only ends what was abandoned.
OPERATION_TIMEOUT = timedelta(minutes=10)
_CONNECT_TIMEOUT = timedelta(seconds=10)
_LOOK_SECONDS = 0.2
# Where ranks of GPUs fail, torch would end the process, by its watchdog or by who watches that one;
# ours goes on with the next epoch's group.
_NO_NCCL_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class Link:
    """A process group, and the operations on it that may not be over.

    Gloo can't be interrupted, and to drop a group waits for its operations, with the interpreter's
    lock. So one that hangs is left to a thread, and dropped when its peers are gone.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._running: deque[Any] = deque()

    def start(self, operation: Callable[[Any], Any]) -> Any:
        """Starts an operation on the group, and notes it. Those that are over are forgotten, in
        order. Raises GroupLost for one that failed unseen, or where the group was ended."""
        while self._running and self._running[0].is_completed():
            over = self._running.popleft()
            try:
                over.wait()
            except RuntimeError as error:
                raise GroupLost(f"another rank is gone: {first_line(error)}") from error
        try:
            work = operation(self.group)
        except dist.DistBackendError as error:  # NCCL's, of a communicator that was aborted
            raise GroupLost(f"the group has ended: {first_line(error)}") from error
        self._running.append(work)
        return work

    def abort(self) -> None:
        """Ends what a GPU waits for. Any thread."""
        group = self.group
        if group is not None:
            group.abort()

    def close(self) -> None:
        """Drops the group, now or when nothing runs on it any more."""
        group, running, self.group = self.group, self._running, None
        if not _all_over(running):
            left = [group, running]
            threading.Thread(target=_wait_for, args=(left,), name="parting", daemon=True).start()


def _all_over(running: Iterable[Any]) -> bool:
    return all(work.is_completed() for work in running)


def _wait_for(left: list[Any]) -> None:
    """Keeps a group for as long as something on it runs: to the end of the process, if need be."""
    while not _all_over(left[1]):
        time.sleep(_LOOK_SECONDS)


@dataclass(frozen=True, slots=True, eq=False)
class Links:
    """Whom a rank talks to. It is asked only for a link that its place gives it.

    `tensor`: the ranks of its stage. `upstream`, `downstream`: it and its neighbour in the stage
    before and behind; who is nearer to the first stage is 0 and sends. `everyone`: all ranks, by
    their hosts.
    """

    store: Store
    tensor: Link
    upstream: Link
    downstream: Link
    everyone: Link

    @classmethod
    def open(
        cls,
        coordinates: RankCoordinates,
        rendezvous: Rendezvous,
        device: torch.device,
        store: Store,
    ) -> Links:
        """Raises RuntimeError or OSError. Every rank opens its links in the same order, and those
        between stages from the first on, so none waits for one that waits for it."""
        address = local_address(rendezvous)
        (tensor_rank, tensor_size), (stage, stage_count) = coordinates.tensor, coordinates.pipeline

        def connect(name: str, rank: int, size: int, on: torch.device = device) -> Link:
            if not 0 <= rank < size or size == 1:
                return Link(None)
            named = PrefixStore(f"{rendezvous.key}/{name}", store)
            return Link(_process_group(named, rank, size, on, address))

        def between(first: int) -> Link:
            """This stage's link between stage `first` and the next, if there are both."""
            exists = 0 <= first < stage_count - 1
            return connect(f"stage {first} {tensor_rank}", stage - first, 2 if exists else 1)

        return cls(
            store=store,
            upstream=between(stage - 1),
            downstream=between(stage),
            tensor=connect(f"tensor {stage}", tensor_rank, tensor_size),
            everyone=connect("all", coordinates.rank, coordinates.size, torch.device("cpu")),
        )

    def abort(self) -> None:
        """Ends what a GPU waits for."""
        for link in (self.tensor, self.upstream, self.downstream):
            link.abort()

    def close(self) -> None:
        """Parts from all."""
        for link in (self.tensor, self.upstream, self.downstream, self.everyone):
            link.close()


def _process_group(store: Store, rank: int, size: int, device: torch.device, address: str) -> Any:
    if device.type == "cuda":
        os.environ.update(_NO_NCCL_WATCHDOG)
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = OPERATION_TIMEOUT
        group = dist.ProcessGroupNCCL(store, rank, size, options)
        # Now, while all open their links in one order, and not in the middle of the first step.
        group.eager_connect_single_device(device)
        return group
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _CONNECT_TIMEOUT
    options._threads = 1
    options._devices = [gloo.create_device(hostname=address)]
    group = gloo(store, rank, size, options)
    group._set_default_timeout(OPERATION_TIMEOUT)
    return group
