"""Worker processes and a control plane with an operators' port; killed ones are started again."""

from __future__ import annotations

import asyncio
import shutil
import signal
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.support.planes import Plane, free_port
from twinplane.control.v1 import control_pb2 as pb
from twinplane.control.v1 import control_pb2_grpc
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc

OVER_SECONDS = 180.0
"""After so long a rollout is over, whatever was killed meanwhile."""
_OPTIONS = (("grpc.enable_http_proxy", 0), ("grpc.max_reconnect_backoff_ms", 200))
CONTROL = -1
"""In place of a worker's number."""


@dataclass(frozen=True)
class Held:
    """What the server holds: what runs and waits, KV tokens that are in use, and how many rows and
    blocks workers hold; weights that wait for a commit, and files that were streamed."""

    running: float
    waiting: float
    kv_active_tokens: float
    prepared: tuple[str, ...]
    prepared_bytes: float
    spooled: tuple[str, ...]


IDLE = Held(0.0, 0.0, 0.0, (), 0.0, ())


class Stack:
    """All processes of a server. `weights` is the folder from which workers may read."""

    def __init__(
        self, folder: Path, model: Path, weights: Path, worker_flags: Sequence[str], replicas: int
    ) -> None:
        self._sockets = Path(tempfile.mkdtemp(prefix="twinplane-"))  # a socket's path must be short
        self._folder, self._model, self._weights = folder, model, weights
        self._worker_flags = worker_flags
        self._start_count = 0
        self._port, self._admin_port = free_port(), free_port()
        self._metrics_ports = [free_port() for _ in range(replicas + 1)]
        self.workers: list[Plane] = []
        self.control: Plane
        self.logs: list[Path] = []

    @property
    def address(self) -> str:
        """Where clients connect."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Starts all; returns when they serve. Raises PlaneFailed."""
        self.workers = [self._worker(n) for n in range(len(self._metrics_ports) - 1)]
        for number, worker in enumerate(self.workers):
            worker.wait_until_serving(self._socket(number))
        self.control = self._control()
        self.control.wait_until_serving(self.address)

    def kill(self, victim: int) -> None:
        """SIGKILL, and the next process is started. Does not wait for that."""
        plane = self.control if victim == CONTROL else self.workers[victim]
        assert plane.stop(signal.SIGKILL) == -signal.SIGKILL, plane.log_end()
        if victim == CONTROL:
            self.control = self._control()
        else:
            self.workers[victim] = self._worker(victim)

    def stop(self) -> list[int]:
        """Tells each to stop. Returns the exit codes."""
        planes = [*([self.control] if hasattr(self, "control") else []), *self.workers]
        codes = [plane.stop() for plane in planes]
        shutil.rmtree(self._sockets, ignore_errors=True)
        return codes

    def resident_bytes(self) -> list[int]:
        """What the processes take of memory, the control plane first."""
        return [
            psutil.Process(plane.process.pid).memory_info().rss
            for plane in (self.control, *self.workers)
        ]

    def child_count(self) -> int:
        """Processes that workers have started. The control plane's render templates."""
        return sum(
            len(psutil.Process(worker.process.pid).children(recursive=True))
            for worker in self.workers
        )

    def samples(self, number: int, name: str, **labels: str) -> float:
        """The sum of a metric of a worker, or of the control plane, with these labels."""
        port = self._metrics_ports[number]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"twinplane_{name}"
            and all(sample.labels.get(key) == value for key, value in labels.items())
        )

    def tracebacks(self) -> list[str]:
        """Lines of logs that tell of a bug."""
        return [
            f"{log.name}: {line}"
            for log in self.logs
            for line in log.read_text(errors="replace").splitlines()
            if "Traceback" in line or "never retrieved" in line
        ]

    async def held(self) -> Held:
        """What is held now."""
        prepared = [await self._prepared(number) for number in range(len(self.workers))]
        spool = self._folder / "state" / "weights"
        numbers = range(len(self.workers))
        return await asyncio.to_thread(
            lambda: Held(
                self.samples(CONTROL, "requests_running"),
                self.samples(CONTROL, "requests_waiting"),
                self.samples(CONTROL, "kv_tokens", state="active"),
                tuple(each for each in prepared if each),
                sum(self.samples(n, "worker_memory_bytes", kind="prepared") for n in numbers),
                tuple(sorted(each.name for each in spool.iterdir())),
            )
        )

    async def idle_again(self) -> Held:
        """What is held once that is nothing, or after too many seconds."""
        until = time.monotonic() + 30.0
        while (held := await self.held()) != IDLE and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        return held

    async def _prepared(self, number: int) -> str:
        async with grpc.aio.insecure_channel(self._socket(number), options=_OPTIONS) as channel:
            stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
            answer = await stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest(), timeout=60)
            return str(answer.worker_info.prepared_update.update_id)

    def _socket(self, number: int) -> str:
        return f"unix:{self._sockets / f'worker-{number}.sock'}"

    def _log(self, name: str) -> Path:
        self._start_count += 1
        self.logs.append(self._folder / f"{name}-{self._start_count}.log")
        return self.logs[-1]

    def _worker(self, number: int) -> Plane:
        socket = self._socket(number).removeprefix("unix:")
        return Plane(
            ["worker", f"--model={self._model}", f"--uds={socket}", f"--worker-id=worker-{number}",
             f"--metrics-port={self._metrics_ports[number]}",
             f"--weights-root={self._weights}", *self._worker_flags],
            self._log(f"worker-{number}"),
        )  # fmt: skip

    def _control(self) -> Plane:
        sockets = [f"--worker={self._socket(n)}" for n in range(len(self._metrics_ports) - 1)]
        return Plane(
            ["control", f"--model={self._model}", f"--port={self._port}", *sockets,
             f"--metrics-port={self._metrics_ports[CONTROL]}", "--log-format=json",
             f"--admin-port={self._admin_port}", f"--state-dir={self._folder / 'state'}"],
            self._log("control"),
        )  # fmt: skip

    @asynccontextmanager
    async def operating(self) -> AsyncIterator[Operator]:
        """Whoever asks for weights."""
        address = f"127.0.0.1:{self._admin_port}"
        async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
            yield Operator(control_pb2_grpc.ControlServiceStub(channel))


@asynccontextmanager
async def stack(
    folder: Path, model: Path, weights: Path, worker_flags: Sequence[str], replicas: int = 2
) -> AsyncIterator[Stack]:
    """A server. None of its processes is left at the end."""
    made = Stack(folder, model, weights, worker_flags, replicas)
    try:
        await asyncio.to_thread(made.start)
        yield made
    finally:
        await asyncio.to_thread(made.stop)


@dataclass(frozen=True)
class Operator:
    """Asks for weights, also while the control plane restarts."""

    stub: Any

    async def state(self) -> pb.WeightsState:
        """What is wanted and what is there."""
        answer = await self.stub.GetWeights(
            pb.GetWeightsRequest(), timeout=OVER_SECONDS, wait_for_ready=True
        )
        state: pb.WeightsState = answer.state
        return state

    async def settled(self) -> pb.WeightsState:
        """What is there once every replica is, no rollout runs and none is to be brought along."""
        state = pb.WeightsState()
        try:
            async with asyncio.timeout(OVER_SECONDS):
                while not is_settled(state := await self._look()):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise AssertionError(f"the rollout does not end: {state}") from None
        return state

    async def _look(self) -> pb.WeightsState:
        try:
            return await self.state()
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            return pb.WeightsState()

    async def update(self, name: str, path: str, strategy: int, policy: int) -> str:
        """Begins a rollout. Returns its id."""
        rollout = pb.WeightsRollout(name=name, strategy=strategy, in_flight=policy)  # type: ignore[arg-type]
        rollout.disk.path = path
        messages = [pb.UpdateWeightsRequest(rollout=rollout)]
        answer = await self.stub.UpdateWeights(iter(messages), timeout=OVER_SECONDS)
        return str(answer.rollout.rollout_id)


def is_settled(state: pb.WeightsState) -> bool:
    """Whether all is as it is to stay."""
    over = (pb.ROLLOUT_STATE_DONE, pb.ROLLOUT_STATE_ROLLED_BACK, pb.ROLLOUT_STATE_FAILED)
    if not state.replicas or (state.HasField("rollout") and state.rollout.state not in over):
        return False
    if state.rollout.state == pb.ROLLOUT_STATE_FAILED:
        return True
    return all(each.phase == pb.REPLICA_PHASE_CURRENT for each in state.replicas)
