"""Ranks as threads of one process: they exchange tensors through memory, without a group."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from worker_service.domain.capability import RankCoordinates

T = TypeVar("T")
_PATIENCE = 30.0


class Exchange:
    """What the ranks of one replica share."""

    def __init__(self, tensor: int, pipeline: int) -> None:
        self.stages = [_Stage(tensor) for _ in range(pipeline)]
        self.ranks = [
            RankCoordinates(tensor=(rank, tensor), pipeline=(stage, pipeline))
            for stage in range(pipeline)
            for rank in range(tensor)
        ]

    def run(self, work: Callable[[int], T]) -> list[T]:
        """Does every rank's work at once; returns what they return, or raises what one does."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def one(index: int) -> None:
            try:
                with torch.inference_mode():
                    results[index] = work(index)
            except BaseException as error:
                errors.append(error)
                for stage in self.stages:
                    stage.barrier.abort()

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[index] for index in range(len(self.ranks))]


class _Stage:
    def __init__(self, tensor: int) -> None:
        self.barrier = threading.Barrier(tensor, timeout=_PATIENCE)
        self.parts: list[torch.Tensor | None] = [None] * tensor
        self.entries: list[queue.SimpleQueue[torch.Tensor]] = [
            queue.SimpleQueue() for _ in range(tensor)
        ]


class ThreadedPeers:
    """In the place of parallel.peers.Peers, as far as a decoder uses it."""

    def __init__(self, exchange: Exchange, index: int) -> None:
        self.coordinates = exchange.ranks[index]
        self._rank, self._stage = self.coordinates.tensor[0], self.coordinates.pipeline[0]
        self._stages = exchange.stages

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        total, *rest = (part.clone() for part in self._shared(x))
        for part in rest:
            total += part
        return total

    def gather(self, x: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        parts = self._shared(x)
        assert [part.shape[1] for part in parts] == list(widths)
        return torch.cat(parts, dim=1) if self._rank == 0 else x.new_empty((0, sum(widths)))

    def send(self, x: torch.Tensor) -> None:
        self._stages[self._stage + 1].entries[self._rank].put(x)

    def receive(self, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(self._stages[self._stage].entries[self._rank].get(timeout=_PATIENCE))

    def _shared(self, x: torch.Tensor) -> list[torch.Tensor]:
        stage = self._stages[self._stage]
        stage.parts[self._rank] = x.clone()
        stage.barrier.wait()
        parts = [part for part in stage.parts if part is not None]
        stage.barrier.wait()
        return parts
