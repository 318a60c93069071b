"""One epoch's group of ranks, by torch.distributed: Gloo on CPUs, NCCL on GPUs.

Process groups are objects of their own here, because torch's default group is a global that lives
as long as the process, and a worker lives through many groups. Every wait for another rank looks a
few times a second whether the group was abandoned: Gloo itself can't be interrupted.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from worker_service.domain.capability import RankCoordinates
from worker_service.domain.columns import IntColumn
from worker_service.domain.errors import GroupLost
from worker_service.domain.rendezvous import Rendezvous
from worker_service.parallel.store import first_line, local_address, meet

# A wait for another rank may be as long as that rank's part of a step. Who hangs is found by the
# controller, which knows what a step takes; this only ends what was abandoned.
_CONNECT_TIMEOUT = timedelta(seconds=10)
_OPERATION_TIMEOUT = timedelta(minutes=10)
_LOOK = timedelta(milliseconds=200)
# Where ranks of GPUs fail, torch would end the process; ours goes on with the next epoch's group.
_NO_NCCL_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


class PendingTokens:
    """Tokens that the answering rank samples, on their way to this one."""

    def __init__(self, group: RankGroup, work: Any, tokens: torch.Tensor) -> None:
        self._group = group
        self._work = work
        self._tokens = tokens

    def is_ready(self) -> bool:
        """Whether `take` would return, or raise, at once."""
        return self._group.is_over or bool(self._work.is_completed())

    def take(self) -> IntColumn:
        """int32, as published. Waits for them. Raises GroupLost."""
        self._group.finish(self._work)
        tokens: IntColumn = self._tokens.numpy()
        return tokens


class RankGroup:
    """The connections of one rank. Used on the device thread; every method may raise GroupLost,
    after which none works any more.

    Collectives run in the order of the calls, which is that of the steps on every rank. A rank that
    calls with another shape than its peers is a bug of ours, and may end the process.
    """

    def __init__(
        self,
        coordinates: RankCoordinates,
        rendezvous: Rendezvous,
        device: torch.device,
        is_abandoned: Callable[[], bool],
    ) -> None:
        """Meets the others. Raises GroupLost. `is_abandoned` is asked during each wait."""
        self._coordinates = coordinates
        self._device = device
        self._is_abandoned = is_abandoned
        self._closed = False
        names = [str(rank) for rank in range(coordinates.size)]
        store = meet(rendezvous, coordinates.rank, names, self._require_open)
        self._links: _Links | None = None
        try:
            self._links = _Links.open(coordinates, rendezvous, device, store)
        except (RuntimeError, OSError) as error:
            raise GroupLost(f"the ranks can't reach each other: {first_line(error)}") from error

    @property
    def is_over(self) -> bool:
        """Whether it was closed or abandoned."""
        return self._closed or self._is_abandoned()

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every tensor rank's x, the same bits on each of them. May overwrite x.

        On a CPU the terms are added in the order of the ranks, so that a sum depends neither on
        what else is in the batch nor on who comes first.
        """
        tensor = self._open_links().tensor
        if self._device.type == "cuda":
            self._finish_on_device(tensor.start(tensor.group.allreduce([x])))
            return x
        parts = [torch.empty_like(x) for _ in range(self._coordinates.tensor[1])]
        self.finish(tensor.start(tensor.group.allgather([parts], [x])))
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor | None:
        """Each tensor rank's x [n, its width], side by side, on the first of them; None on others.

        `widths` are those of all tensor ranks.
        """
        rank, size = self._coordinates.tensor
        own = x.new_zeros((x.shape[0], max(widths)))
        own[:, : widths[rank]] = x
        outputs = [[torch.empty_like(own) for _ in range(size)]] if rank == 0 else []
        options = dist.GatherOptions()
        options.rootRank = 0
        tensor = self._open_links().tensor
        self._finish_on_device(tensor.start(tensor.group.gather(outputs, [own], options)))
        if rank != 0:
            return None
        parts = [part[:, :width] for part, width in zip(outputs[0], widths, strict=True)]
        return torch.cat(parts, dim=1)

    def send(self, x: torch.Tensor) -> None:
        """Gives x to the next stage. Returns at once; x may not be written any more."""
        link = self._open_links().downstream
        link.start(link.group.broadcast([x], _from(0)))

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Fills `out` with what the stage before this one sends."""
        link = self._open_links().upstream
        self._finish_on_device(link.start(link.group.broadcast([out], _from(0))))
        return out

    def publish(self, tokens: IntColumn) -> None:
        """Gives sampled tokens int32 [n] to every other rank. Only the answering rank does."""
        self._share(torch.from_numpy(np.array(tokens, dtype=np.int32)))

    def expect(self, count: int) -> PendingTokens:
        """The next `count` tokens that the answering rank publishes."""
        tokens = torch.empty(count, dtype=torch.int32)
        return PendingTokens(self, self._share(tokens), tokens)

    def finish(self, work: Any) -> None:
        """Waits for an operation between hosts."""
        deadline = time.monotonic() + _OPERATION_TIMEOUT.total_seconds()
        while True:
            try:
                work.wait(_LOOK)
                return
            except RuntimeError as error:
                if work.is_completed():
                    break
                self._require_open()
                if time.monotonic() > deadline:
                    raise GroupLost("another rank did not answer in time") from error
        try:
            work.wait()  # it was over at the last moment, or it has failed
        except RuntimeError as error:
            self._require_open()
            raise GroupLost(f"another rank is gone: {first_line(error)}") from error

    def abort(self) -> None:
        """Ends what the device waits for. Any thread; on a CPU waits look by themselves."""
        if self._device.type == "cuda" and (links := self._links) is not None:
            links.abort()

    def close(self) -> None:
        """Parts from the others, whose waits for this rank end. Idempotent."""
        self._closed = True
        links, self._links = self._links, None
        if links is not None:
            links.close()

    def _share(self, tokens: torch.Tensor) -> Any:
        everyone = self._open_links().everyone
        options = _from(self._coordinates.answering_rank)
        return everyone.start(everyone.group.broadcast([tokens], options))

    def _finish_on_device(self, work: Any) -> None:
        if self._device.type == "cuda":
            work.wait()  # the stream waits; whoever reads the result on the host is told by a check
        else:
            self.finish(work)

    def _open_links(self) -> _Links:
        self._require_open()
        assert self._links is not None
        return self._links

    def _require_open(self) -> None:
        if self._is_abandoned():
            raise GroupLost("a newer claim ended this group")
        if self._closed:
            raise GroupLost("the group is lost; attach again")


class _Link:
    """A process group, and the operations on it that may not be over.

    Gloo can't be interrupted, and to drop a group waits for its operations, with the interpreter's
    lock. So one that hangs is left to a thread, and dropped when its peers are gone.
    """

    def __init__(self, group: Any) -> None:
        self.group = group
        self._running: deque[Any] = deque()

    def start(self, work: Any) -> Any:
        """Notes an operation. Those that are over are forgotten, in order. Raises GroupLost for
        one that failed unseen."""
        while self._running and self._running[0].is_completed():
            over = self._running.popleft()
            try:
                over.wait()
            except RuntimeError as error:
                raise GroupLost(f"another rank is gone: {first_line(error)}") from error
        self._running.append(work)
        return work

    def close(self) -> None:
        group, running, self.group = self.group, self._running, None
        if not _all_over(running):
            left = [group, running]
            threading.Thread(target=_wait_for, args=(left,), name="parting", daemon=True).start()


def _all_over(running: Iterable[Any]) -> bool:
    return all(work.is_completed() for work in running)


def _wait_for(left: list[Any]) -> None:
    """Keeps a group for as long as something on it runs: to the end of the process, if need be."""
    while not _all_over(left[1]):
        time.sleep(_LOOK.total_seconds())


@dataclass(frozen=True, slots=True, eq=False)
class _Links:
    """Whom a rank talks to. It is asked only for a link that its place gives it.

    `tensor`: the ranks of its stage. `upstream`, `downstream`: it and its neighbour in the stage
    before and behind; who is nearer to the first stage is 0 and sends. `everyone`: all ranks, by
    their hosts.
    """

    store: Store
    tensor: _Link
    upstream: _Link
    downstream: _Link
    everyone: _Link

    @classmethod
    def open(
        cls,
        coordinates: RankCoordinates,
        rendezvous: Rendezvous,
        device: torch.device,
        store: Store,
    ) -> _Links:
        """Raises RuntimeError or OSError. Every rank opens its links in the same order, and those
        between stages from the first on, so none waits for one that waits for it."""
        address = local_address(rendezvous)
        (tensor_rank, tensor_size), (stage, stage_count) = coordinates.tensor, coordinates.pipeline

        def connect(name: str, rank: int, size: int, on: torch.device = device) -> _Link:
            if not 0 <= rank < size or size == 1:
                return _Link(None)
            named = PrefixStore(f"{rendezvous.key}/{name}", store)
            return _Link(_process_group(named, rank, size, on, address))

        def between(first: int) -> _Link:
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
            if link.group is not None:
                link.group.abort()

    def close(self) -> None:
        for link in (self.tensor, self.upstream, self.downstream, self.everyone):
            link.close()


def _process_group(store: Store, rank: int, size: int, device: torch.device, address: str) -> Any:
    if device.type == "cuda":
        os.environ.update(_NO_NCCL_WATCHDOG)
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = _OPERATION_TIMEOUT
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = _CONNECT_TIMEOUT
    options._threads = 1
    options._devices = [gloo.create_device(hostname=address)]
    group = gloo(store, rank, size, options)
    group._set_default_timeout(_OPERATION_TIMEOUT)
    return group


def _from(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options
