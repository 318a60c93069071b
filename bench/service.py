"""A Twinplane service of our own for a benchmark, and a bounded load on it. Loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.load import Load, rates
from bench.trees import Tree
from twinplane import AsyncClient


@dataclass(frozen=True, slots=True)
class Service:
    """A running server. `ready_seconds`: from its start until health says SERVING."""

    address: str
    pid: int
    ready_seconds: float


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serving(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=1
            )
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@contextlib.contextmanager
def served(*arguments: str, tree: Tree | None = None, timeout: float = 120.0) -> Iterator[Service]:
    """Runs `twinplane up`, of another tree if one is given, until the block is left."""
    port, metrics_port = free_port(), free_port()
    flags = ["--port", str(port), "--metrics-port", str(metrics_port)]
    with _process(f"127.0.0.1:{port}", ["up", *flags, *arguments], timeout, tree) as service:
        yield service


def worker_process(
    address: str, *arguments: str, timeout: float = 120.0
) -> contextlib.AbstractContextManager[Service]:
    """Runs `twinplane worker` alone, listening as the arguments say, until the block is left."""
    return _process(address, ["worker", *arguments], timeout)


def control_process(
    port: int, *arguments: str, timeout: float = 120.0
) -> contextlib.AbstractContextManager[Service]:
    """Runs `twinplane control` alone until the block is left."""
    flags = ["--port", str(port), "--metrics-port", str(free_port())]
    return _process(f"127.0.0.1:{port}", ["control", *flags, *arguments], timeout)


def running(command: Sequence[str], address: str) -> contextlib.AbstractContextManager[Service]:
    """Runs a gRPC server of a benchmark's own until the block is left."""
    return _running(command, address, 60.0)


def _process(
    address: str, arguments: Sequence[str], timeout: float, tree: Tree | None = None
) -> contextlib.AbstractContextManager[Service]:
    return _running([sys.executable, "-m", "twinplane.cli", *arguments], address, timeout, tree)


@contextlib.contextmanager
def _running(
    command: Sequence[str], address: str, timeout: float, tree: Tree | None = None
) -> Iterator[Service]:
    with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            cwd=tree.folder if tree else None, env=tree.environment if tree else None,
        )  # fmt: skip
        try:
            while not _serving(address):
                if process.poll() is not None or time.perf_counter() - started > timeout:
                    raise RuntimeError(f"{command} is not serving:\n{Path(log.name).read_text()}")
                time.sleep(0.02)
            yield Service(address, process.pid, time.perf_counter() - started)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            Path(log.name).unlink()


def load(address: str, prompts: Sequence[list[int]], streams: int, output_tokens: int) -> Load:
    """Generates `output_tokens` greedily from each prompt, `streams` at a time."""
    return asyncio.run(_load(address, prompts, streams, output_tokens))


async def _load(
    address: str, prompts: Sequence[list[int]], streams: int, output_tokens: int
) -> Load:
    async with AsyncClient(address) as client:
        slots = asyncio.Semaphore(streams)

        async def one(prompt: list[int]) -> list[float]:
            async with slots:
                started = time.perf_counter()
                stamps: list[float] = []
                count = 0
                generation = client.generate(
                    prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True
                )
                async for delta in generation:
                    if delta.token_ids:
                        stamps.append(time.perf_counter() - started)
                        count += len(delta.token_ids)
                if count != output_tokens:
                    raise RuntimeError(f"{count} tokens instead of {output_tokens}")
                return stamps

        started = time.perf_counter()
        stamps = await asyncio.gather(*map(one, prompts))
        wall = time.perf_counter() - started
    return rates(prompts, output_tokens, wall, stamps)
