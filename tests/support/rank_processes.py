"""The ranks of a replica as real processes, driven like one runner.

Processes are started once and load one model after another, because importing torch takes longest.
"""

from __future__ import annotations

import multiprocessing
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support import runner_rig, weight_updates
from worker_service.domain.capability import Capability, MemoryPool, RankCoordinates
from worker_service.domain.plan import SamplePlan, StepPlan, StepResult, WeightVersion
from worker_service.domain.rendezvous import Rendezvous
from worker_service.domain.weights import WeightsUpdate
from worker_service.runner.interface import CompletedStep
from worker_service.runner.load import load_runner
from worker_service.runner.model_runner import ModelRunner

PATIENCE = 60.0
"""Seconds after which an answer is given up: generous, for a busy machine."""


class RankError(Exception):
    """What a rank's process raised: `kind` is the name of the error's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Rank:
    """One process. Calls are carried out in order; `abandon` overtakes them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, name: str, *arguments: object) -> None:
        """Starts a call; `end` has its answer."""
        self._connection.send((name, arguments))

    def end(self, patience: float = PATIENCE) -> Any:
        """The answer to the first call that has none yet. Raises RankError."""
        assert self._connection.poll(patience), "no answer"
        kind, answer = self._connection.recv()
        if kind:
            raise RankError(kind, answer)
        return answer

    def call(self, name: str, *arguments: object) -> Any:
        self.begin(name, *arguments)
        return self.end()

    def abandon(self, before_epoch: int) -> None:
        self._connection.send(("abandon", (before_epoch,)))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        """Ends the process as a worker ends; says how it ended."""
        if self.process.is_alive():
            self._connection.send(None)
            self.process.join(PATIENCE)
        self._connection.close()


@dataclass(slots=True, eq=False)
class Replica:
    """Ranks that hold one model: a runner for RunnerRig, and for `generate`."""

    ranks: Sequence[Rank]
    answering: int
    address: str
    epoch: int = 0
    results: list[list[StepResult]] = field(default_factory=list)

    @classmethod
    def load(
        cls, ranks: Sequence[Rank], folder: Path, tensor: int, pipeline: int, **changes: Any
    ) -> Replica:
        """Loads the folder on tensor · pipeline of the ranks; they meet with `join` or `reset`."""
        members = ranks[: tensor * pipeline]
        for index, rank in enumerate(members):
            place = coordinates(index, tensor, pipeline)
            options = runner_rig.options(folder, thread_count=1, ranks=place, **changes)
            rank.begin("load", replace(options, progress=print_nothing))
        addresses = [rank.end() for rank in members]
        answering = coordinates(0, tensor, pipeline).answering_rank
        return cls(members, answering, addresses[0])

    def swap(self, update: WeightsUpdate, folder: Path | None = None) -> set[WeightVersion]:
        """Every rank takes other weights, see `_Served.swap`. Returns their versions."""
        for rank in self.ranks:
            rank.begin("swap", update, folder)
        return {rank.end() for rank in self.ranks}

    def join(self) -> None:
        """A new epoch with a new group."""
        self.epoch += 1
        for rank in self.ranks:
            rank.begin("join", rendezvous(self.address, self.epoch))
        for rank in self.ranks:
            rank.end()

    def capability(self) -> Capability:
        capability: Capability = self.ranks[self.answering].call("capability")
        return capability

    def memory_pools(self) -> list[MemoryPool]:
        return [rank.call("memory_pool") for rank in self.ranks]

    def memory_pool(self) -> MemoryPool:
        return self.memory_pools()[0]

    def reset(self) -> None:
        """A group lasts for one epoch, so this begins another."""
        self.join()

    def launch(self, plan: StepPlan) -> CompletedStep:
        return CompletedStep(self._everywhere("step", plan))

    def launch_sample(self, plan: SamplePlan) -> CompletedStep:
        return CompletedStep(self._everywhere("sample", plan))

    def _everywhere(self, name: str, plan: StepPlan | SamplePlan) -> StepResult:
        for rank in self.ranks:
            rank.begin(name, plan)
        results: list[StepResult] = [rank.end() for rank in self.ranks]
        digests = {result.digest for result in results}
        assert len(digests) == 1 and digests != {b""}, "the ranks have drifted apart"
        for index, result in enumerate(results):
            assert index == self.answering or not result.rows.size
        return results[self.answering]


def coordinates(index: int, tensor: int, pipeline: int) -> RankCoordinates:
    stage, rank = divmod(index, tensor)
    place = RankCoordinates(tensor=(rank, tensor), pipeline=(stage, pipeline))
    assert place.rank == index
    return place


def rendezvous(address: str, epoch: int, timeout: float = PATIENCE) -> Rendezvous:
    host, _, port = address.rpartition(":")
    return Rendezvous(epoch, host, int(port), f"epoch {epoch}", timeout)


def print_nothing(line: str) -> None:
    pass


class _Served:
    """What a rank's process does."""

    def __init__(self) -> None:
        self.runner: ModelRunner | None = None
        self.pending: deque[Any] = deque()

    def load(self, options: Any) -> str:
        self.runner = load_runner(options)
        return self.runner.capability().rendezvous_address

    def join(self, at: Rendezvous) -> None:
        assert self.runner is not None
        self.runner.reset()
        self.runner.join(at)

    def launch(self, plan: StepPlan | SamplePlan) -> bool:
        """Whether the step is over at once; `collect` has its result."""
        assert self.runner is not None
        if isinstance(plan, SamplePlan):
            self.pending.append(self.runner.launch_sample(plan))
        else:
            self.pending.append(self.runner.launch(plan))
        return bool(self.pending[-1].is_ready())

    def collect(self) -> StepResult:
        result: StepResult = self.pending.popleft().result()
        return result

    def step(self, plan: StepPlan) -> StepResult:
        assert self.runner is not None
        return self.runner.launch(plan).result()

    def swap(self, update: WeightsUpdate, folder: Path | None) -> WeightVersion:
        """Takes other weights: those of the folder as a stream, or from where the update says."""
        assert self.runner is not None
        tensors = None if folder is None else weight_updates.tensors_in(folder)
        return weight_updates.swap(self.runner, update, tensors)

    def sabotage(self) -> None:
        """The next step fails in the middle of the model, as a bug would let it."""
        assert self.runner is not None
        executor: Any = self.runner._weights.executor
        attention = executor._model._layers[-1]._attention
        output = attention._output

        def fail(x: Any) -> Any:
            attention._output = output
            raise ValueError("a bug")

        attention._output = fail

    def sample(self, plan: SamplePlan) -> StepResult:
        assert self.runner is not None
        return self.runner.launch_sample(plan).result()

    def call(self, name: str, arguments: tuple[Any, ...]) -> Any:
        own = getattr(self, name, None)
        return (own or getattr(self.runner, name))(*arguments)


def _serve(connection: Connection) -> None:
    served, jobs = _Served(), queue.SimpleQueue[Any]()

    def listen() -> None:
        while True:
            try:
                message = connection.recv()
            except EOFError:
                message = None
            if message is not None and message[0] == "abandon":
                assert served.runner is not None
                served.runner.abandon(*message[1])
                continue
            jobs.put(message)
            if message is None:
                return

    threading.Thread(target=listen, daemon=True).start()
    while (job := jobs.get()) is not None:
        try:
            connection.send(("", served.call(*job)))
        except Exception as error:
            connection.send((type(error).__name__, str(error)))
    served.runner = None
