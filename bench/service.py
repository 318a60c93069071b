"""A Twinplane service of our own for a benchmark, and a bounded load on it. Loopback only."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinplane import AsyncClient


@dataclass(frozen=True, slots=True)
class Service:
    """A running `twinplane up`. `ready_seconds`: from its start until health says SERVING."""

    address: str
    pid: int
    ready_seconds: float


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients saw: rates per second over the whole run, median times in seconds."""

    output_tokens_per_second: float
    total_tokens_per_second: float
    first_token_seconds: float
    between_tokens_seconds: float


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
def served(*arguments: str, timeout: float = 120.0) -> Iterator[Service]:
    """Runs `twinplane up` with the arguments until the block is left."""
    port, metrics_port = free_port(), free_port()
    command = [
        sys.executable, "-m", "twinplane.cli", "up", "--port", str(port),
        "--metrics-port", str(metrics_port), *arguments,
    ]  # fmt: skip
    with tempfile.NamedTemporaryFile("w+", suffix=".log", delete=False) as log:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            while not _serving(f"127.0.0.1:{port}"):
                if process.poll() is not None or time.perf_counter() - started > timeout:
                    raise RuntimeError(
                        f"twinplane up is not serving:\n{Path(log.name).read_text()}"
                    )
                time.sleep(0.05)
            yield Service(f"127.0.0.1:{port}", process.pid, time.perf_counter() - started)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            Path(log.name).unlink()


def random_prompts(count: int, length: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts that share no prefix, so that no cache helps."""
    draw = random.Random(seed)
    return [[draw.randrange(100, vocabulary) for _ in range(length)] for _ in range(count)]


def load(address: str, prompts: Sequence[list[int]], streams: int, output_tokens: int) -> Load:
    """Generates `output_tokens` greedily from each prompt, `streams` at a time."""
    return asyncio.run(_load(address, prompts, streams, output_tokens))


async def _load(
    address: str, prompts: Sequence[list[int]], streams: int, output_tokens: int
) -> Load:
    first: list[float] = []
    between: list[float] = []
    async with AsyncClient(address) as client:
        slots = asyncio.Semaphore(streams)

        async def one(prompt: list[int]) -> None:
            async with slots:
                started = time.perf_counter()
                stamps: list[float] = []
                count = 0
                generation = client.generate(
                    prompt, max_tokens=output_tokens, temperature=0.0, ignore_eos=True
                )
                async for delta in generation:
                    if delta.token_ids:
                        stamps.append(time.perf_counter())
                        count += len(delta.token_ids)
                if count != output_tokens:
                    raise RuntimeError(f"{count} tokens instead of {output_tokens}")
                first.append(stamps[0] - started)
                between.append((stamps[-1] - stamps[0]) / max(1, output_tokens - 1))

        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                group.create_task(one(prompt))
        wall = time.perf_counter() - started
    output = len(prompts) * output_tokens
    return Load(
        output_tokens_per_second=output / wall,
        total_tokens_per_second=(output + sum(map(len, prompts))) / wall,
        first_token_seconds=statistics.median(first),
        between_tokens_seconds=statistics.median(between),
    )
