"""Resident memory of both planes, against what a worker can't do without: weights and KV.

The KV pool is small and the load fills it, so that all its pages are there; a pool is otherwise
resident only as far as it was used. Figures are of whole processes, Python, torch and gRPC
included.

    python -m bench.memory [--kv-megabytes 256] [--quantization int8]
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc
import psutil

from bench import options as flags
from bench.contestants import VOCABULARY
from bench.load import random_prompts
from bench.results import Results
from bench.service import Service, control_process, free_port, load, worker_process
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc

MEBI = 1 << 20
STREAMS = 32


@dataclass(frozen=True, slots=True)
class Pool:
    """The worker's own account, in bytes, and how many tokens the KV pool holds."""

    weights_bytes: int
    kv_bytes: int
    token_count: int


@dataclass(frozen=True, slots=True)
class Resident:
    """A process's resident bytes, and those of them that it shares with no other."""

    rss: int
    uss: int


def main() -> None:
    parser = flags.parser(__doc__, rounds=1, peers=False)
    parser.add_argument("--kv-megabytes", type=int, default=256)
    parser.add_argument("--quantization", default=None, choices=["int8"])
    options = parser.parse_args()
    kind = options.quantization or "float32"
    results = flags.open_results("memory" if kind == "float32" else f"memory_{kind}", options)
    for _ in range(options.rounds):
        measure(options, results, kind)
    results.show()


def measure(options: argparse.Namespace, results: Results, kind: str) -> None:
    weights = [] if options.quantization is None else ["--quantization", options.quantization]
    with contextlib.ExitStack() as stack:
        socket = Path(stack.enter_context(TemporaryDirectory(prefix="twinplane-"))) / "worker.sock"
        address = f"unix:{socket}"
        worker = stack.enter_context(
            worker_process(
                address,
                "--uds",
                str(socket),
                "--model",
                options.model,
                "--kv-cache-memory-bytes",
                str(options.kv_megabytes * MEBI),
                *weights,
            )
        )
        control = stack.enter_context(
            control_process(free_port(), "--model", options.model, "--worker", address)
        )
        pool = read_pool(address)
        after_load = {"worker": resident(worker), "control plane": resident(control)}
        fill(control, pool)
        needed = pool.weights_bytes + pool.kv_bytes
        case = f"{kind}, {options.kv_megabytes} MiB of KV"
        results.measured(case, "weights", "MiB", [pool.weights_bytes / MEBI])
        results.measured(case, "KV pool", "MiB", [pool.kv_bytes / MEBI])
        for name, plane in (("worker", worker), ("control plane", control)):
            after = resident(plane)
            record = results.measured(
                case, f"{name}, resident", "MiB", [after.rss / MEBI],
                unshared_mib=after.uss / MEBI, after_start_mib=after_load[name].rss / MEBI,
            )  # fmt: skip
            results.ratio(
                case, f"{name}, resident", "weights + KV pool", "bytes",
                record.median * MEBI / needed,
            )  # fmt: skip


def read_pool(address: str) -> Pool:
    """From the worker's GetMemoryPool, which claims nothing."""
    with grpc.insecure_channel(address) as channel:
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        answer = stub.GetMemoryPool(model_runner_pb2.GetMemoryPoolRequest(), timeout=10)
    pool = answer.memory_pool
    tokens = (pool.block_count - 1) * pool.block_token_count
    return Pool(pool.memory.weights_bytes, pool.memory.kv_bytes, tokens)


def fill(control: Service, pool: Pool) -> None:
    """Sequences whose KV together takes the whole pool."""
    length = pool.token_count // STREAMS + 16
    load(control.address, random_prompts(STREAMS, length, VOCABULARY, seed=0), STREAMS, 4)


def resident(service: Service) -> Resident:
    """Of one plane, now."""
    memory = psutil.Process(service.pid).memory_full_info()
    return Resident(memory.rss, memory.uss)


if __name__ == "__main__":
    main()
