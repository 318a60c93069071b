"""Real processes: signals to both planes at once, a slow reader, a frozen worker, a killed `up`."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest

from tests.support.planes import STOP_SECONDS, Plane, free_port, is_serving, running_planes
from tests.support.tiny_model import write_tiny_model
from twinplane.inference.v1 import inference_pb2, inference_pb2_grpc

pytestmark = pytest.mark.slow

SLOW_STEPS = ("--simulate", "--simulate-step-ms=10", "--max-model-len=9000")
TOKEN_COUNT = 100


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


@dataclass(slots=True)
class Outcome:
    """What a client got. `code` is None for a whole answer."""

    tokens: list[int]
    code: grpc.StatusCode | None = None


class Clients:
    """Streams that run in threads of their own."""

    def __init__(self, address: str, *options: tuple[str, int]) -> None:
        self._channel = grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0), *options])
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._pool = ThreadPoolExecutor(16)

    def start(self, seed: int, count: int = TOKEN_COUNT, rest: float = 0.0) -> Future[Outcome]:
        """A stream of `count` tokens. Its reader rests for so many seconds after the first."""
        return self._pool.submit(self._read, seed, count, rest)

    def _read(self, seed: int, count: int, rest: float) -> Outcome:
        stop = inference_pb2.StopConditions(max_tokens=count, ignore_end_of_sequence=True)
        request = inference_pb2.GenerateRequest(text="ab", stop=stop)
        request.sampling.seed = seed
        outcome = Outcome([])
        try:
            for response in self._stub.Generate(request, timeout=60):
                if response.delta.token_ids and not outcome.tokens:
                    time.sleep(rest)
                outcome.tokens += response.delta.token_ids
        except grpc.RpcError as error:
            outcome.code = error.code()
        return outcome

    def close(self) -> None:
        self._pool.shutdown()
        self._channel.close()


@contextmanager
def clients(address: str, *options: tuple[str, int]) -> Iterator[Clients]:
    made = Clients(address, *options)
    try:
        yield made
    finally:
        made.close()


def alone(address: str, seeds: Sequence[int]) -> dict[int, list[int]]:
    """The undisturbed answers, all at once: batch mates change nothing."""
    with clients(address) as undisturbed:
        running = {seed: undisturbed.start(seed) for seed in seeds}
        outcomes = {seed: future.result() for seed, future in running.items()}
    assert all(outcome.code is None for outcome in outcomes.values())
    return {seed: outcome.tokens for seed, outcome in outcomes.items()}


def last_line(plane: Plane) -> dict[str, Any]:
    line: dict[str, Any] = json.loads(plane.log.read_text().splitlines()[-1])
    return line


def test_both_planes_are_told_at_once(tmp_path: Path, model: Path) -> None:
    """As in a pod or a control group; or Ctrl-C in a terminal that runs both."""
    with running_planes(tmp_path, model, worker_flags=SLOW_STEPS) as planes:
        seeds = range(8)
        right = alone(planes.address, seeds)
        with clients(planes.address) as disturbed:
            running = {seed: disturbed.start(seed) for seed in seeds}
            time.sleep(0.3)
            for plane in (planes.worker, planes.control):
                plane.process.send_signal(signal.SIGINT)
            outcomes = {seed: future.result() for seed, future in running.items()}
        assert {seed: outcome.tokens for seed, outcome in outcomes.items()} == right
        assert all(outcome.code is None for outcome in outcomes.values())
        for plane in (planes.control, planes.worker):
            assert plane.process.wait(STOP_SECONDS) == 0
            assert last_line(plane)["message"] == "stopped"
            assert last_line(plane)["reason"] == "SIGINT"


def test_a_slow_reader_gets_its_tail(tmp_path: Path, model: Path) -> None:
    """The transport holds little, so most of the answer waits in the server when it is told."""
    fast = ("--simulate", "--simulate-step-ms=0", "--max-model-len=9000")
    window = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
    with (
        running_planes(tmp_path, model, worker_flags=fast) as planes,
        clients(planes.address, *window) as reader,
    ):
        slow = reader.start(1, 5500, rest=8.0)
        time.sleep(0.5)
        planes.control.process.send_signal(signal.SIGTERM)
        outcome = slow.result()
        assert (len(outcome.tokens), outcome.code) == (5500, None)
        assert planes.control.process.wait(STOP_SECONDS) == 0


def test_a_frozen_worker_costs_readiness_and_no_token(tmp_path: Path, model: Path) -> None:
    with running_planes(tmp_path, model, worker_flags=SLOW_STEPS) as planes:
        seeds = range(3)
        right = alone(planes.address, seeds)
        with clients(planes.address) as disturbed:
            running = {seed: disturbed.start(seed) for seed in seeds}
            time.sleep(0.3)
            planes.worker.process.send_signal(signal.SIGSTOP)
            frozen = time.monotonic()
            while is_serving(planes.address):
                assert time.monotonic() - frozen < 10.0
                time.sleep(0.05)
            assert is_serving(planes.address, "liveness")
            planes.worker.process.send_signal(signal.SIGCONT)
            outcomes = {seed: future.result() for seed, future in running.items()}
            assert {seed: outcome.tokens for seed, outcome in outcomes.items()} == right
            planes.control.wait_until_serving(planes.address)


@contextmanager
def up(folder: Path, model: Path) -> Iterator[tuple[Plane, str, list[psutil.Process]]]:
    """`twinplane up`, its address, and its planes' processes."""
    port = free_port()
    flags = (f"--model={model}", f"--port={port}", "--metrics-port=none", "--log-format=json")
    process = Plane(["up", *SLOW_STEPS, *flags], folder / "up.log")
    try:
        process.wait_until_serving(f"127.0.0.1:{port}")
        children = psutil.Process(process.process.pid).children(recursive=True)
        yield process, f"127.0.0.1:{port}", children
    finally:
        process.stop()


@pytest.mark.parametrize("whom", ["all", "up"])
def test_a_control_group_is_told_and_up_is_killed(tmp_path: Path, model: Path, whom: str) -> None:
    """SIGTERM to `up` and its planes: none of them takes `up`'s word for a second signal. SIGKILL
    of `up` alone: the planes finish what runs, and nothing is left.
    """
    with up(tmp_path, model) as (process, address, children):
        right = alone(address, [1, 2])
        with clients(address) as disturbed:
            running = {seed: disturbed.start(seed) for seed in right}
            time.sleep(0.3)
            if whom == "all":
                for child in children:
                    child.send_signal(signal.SIGTERM)
                process.process.send_signal(signal.SIGTERM)
            else:
                process.process.kill()
            outcomes = {seed: future.result() for seed, future in running.items()}
        assert {seed: outcome.tokens for seed, outcome in outcomes.items()} == right
        assert process.process.wait(STOP_SECONDS) == (0 if whom == "all" else -signal.SIGKILL)
        _, alive = psutil.wait_procs(children, STOP_SECONDS)
        assert not alive
    assert whom == "up" or process.log.read_text().splitlines()[-1] == "stopped: SIGTERM"
