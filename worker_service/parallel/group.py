"""One epoch's group of ranks, by torch.distributed: Gloo on CPUs, NCCL on GPUs.

Every wait for another rank looks a few times a second whether the group was abandoned: Gloo itself
can't be interrupted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from worker_service.domain.capability import RankCoordinates
from worker_service.domain.columns import IntColumn
from worker_service.domain.errors import GroupLost
from worker_service.domain.rendezvous import Rendezvous
from worker_service.parallel.links import OPERATION_TIMEOUT, Links
from worker_service.parallel.store import first_line, meet

_LOOK = timedelta(milliseconds=200)


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
        self._links: Links | None = None
        try:
            self._links = Links.open(coordinates, rendezvous, device, store)
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
            self._finish_on_device(tensor.start(lambda group: group.allreduce([x])))
            return x
        parts = [torch.empty_like(x) for _ in range(self._coordinates.tensor[1])]
        self.finish(tensor.start(lambda group: group.allgather([parts], [x])))
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
        self._finish_on_device(tensor.start(lambda group: group.gather(outputs, [own], options)))
        if rank != 0:
            return None
        parts = [part[:, :width] for part, width in zip(outputs[0], widths, strict=True)]
        return torch.cat(parts, dim=1)

    def send(self, x: torch.Tensor) -> None:
        """Gives x to the next stage. Returns at once; x may not be written any more."""
        link = self._open_links().downstream
        link.start(lambda group: group.broadcast([x], _from(0)))

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        """Fills `out` with what the stage before this one sends."""
        link = self._open_links().upstream
        self._finish_on_device(link.start(lambda group: group.broadcast([out], _from(0))))
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
        deadline = time.monotonic() + OPERATION_TIMEOUT.total_seconds()
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
        """Ends what the device waits for. Any thread, which is not kept waiting for that; on a CPU
        waits look by themselves."""
        if self._device.type == "cuda" and (links := self._links) is not None:
            threading.Thread(target=links.abort, name="aborting", daemon=True).start()

    def close(self) -> None:
        """Parts from the others, whose waits for this rank end. Idempotent."""
        self._closed = True
        links, self._links = self._links, None
        if links is not None:
            if self._device.type == "cuda":
                links.abort()
            links.close()

    def _share(self, tokens: torch.Tensor) -> Any:
        everyone = self._open_links().everyone
        options = _from(self._coordinates.answering_rank)
        return everyone.start(lambda group: group.broadcast([tokens], options))

    def _finish_on_device(self, work: Any) -> None:
        if self._device.type == "cuda":
            work.wait()  # the stream waits; whoever reads the result on the host is told by a check
        else:
            self.finish(work)

    def _open_links(self) -> Links:
        self._require_open()
        assert self._links is not None
        return self._links

    def _require_open(self) -> None:
        if self._is_abandoned():
            raise GroupLost("a newer claim ended this group")
        if self._closed:
            raise GroupLost("the group is lost; attach again")


def _from(root: int) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = root
    return options
