"""How long a refusal takes when far more is asked for than can wait.

The queue of a control plane is full of requests that take long. Then thousands of requests more
come, so many at a time, and each gets its RESOURCE_EXHAUSTED. The floor is a bare grpc.aio server
that refuses every call at once, and knows no request. Clients share the machine with the server:
with all at a time, their own work is most of what they wait for. A last request has a text of
262,144 characters, which nobody looks at.

    python -m bench.refusals [--requests 3000] [--at-once 32 128 3000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import grpc

from bench import options as flags
from bench.results import Results
from bench.service import control_process, free_port, running, worker_process
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2, inference_pb2_grpc
from twinplane.process.event_loop import new_event_loop

_ROWS, _WAITING = 4, 8
_LARGE = 262_144
_AT_MOST_MS = 100.0


def main() -> None:
    parser = flags.parser(__doc__, rounds=3, peers=False)
    parser.add_argument("--requests", type=int, default=3_000)
    parser.add_argument("--at-once", type=int, nargs="+", default=[32, 128, 3_000])
    options = parser.parse_args()
    results = flags.open_results("refusals", options)
    with TemporaryDirectory(prefix="twinplane-") as folder:
        measure(options, results, Path(folder))
    results.show()


def measure(options: argparse.Namespace, results: Results, folder: Path) -> None:
    socket, port, floor_port = folder / "worker.sock", free_port(), free_port()
    floor = f"127.0.0.1:{floor_port}"
    samples: dict[tuple[int, str], list[list[float]]] = {}
    large: list[float] = []
    model = ("--model", options.model)
    simulated = ("--simulate", "--simulate-step-ms", "200", "--max-num-seqs", str(_ROWS))
    with (
        worker_process(f"unix:{socket}", *model, "--uds", str(socket), *simulated),
        control_process(
            port, *model, "--worker", f"unix:{socket}", "--max-num-waiting", str(_WAITING)
        ) as ours,
        running([sys.executable, "-m", "bench.refusing_server", str(floor_port)], floor),
        asyncio.Runner(loop_factory=new_event_loop) as runner,
    ):
        for at_once in options.at_once * options.rounds:
            for name, address in (("twinplane", ours.address), ("floor", floor)):
                seconds, one = runner.run(burst(address, options.requests, at_once, name))
                samples.setdefault((at_once, name), []).append(seconds)
                large += [one] if name == "twinplane" else []
    for at_once in options.at_once:
        record(results, at_once, samples)
    results.measured("262,144 characters", "twinplane", "ms", [1e3 * each for each in large])


def record(
    results: Results, at_once: int, samples: dict[tuple[int, str], list[list[float]]]
) -> None:
    for share, title in ((0.5, "p50"), (0.99, "p99")):
        case = f"{at_once} at once, {title}"
        ours, floor = (
            results.measured(case, name, "ms", [1e3 * at(share, each) for each in rounds])
            for name in ("twinplane", "floor")
            for rounds in (samples[at_once, name],)
        )
        results.ratio(case, "floor", "twinplane", "of the floor", ours.median / floor.median)


def at(share: float, seconds: Sequence[float]) -> float:
    """A quantile."""
    return statistics.quantiles(seconds, n=100, method="inclusive")[round(100 * share) - 1]


async def burst(address: str, requests: int, at_once: int, name: str) -> tuple[list[float], float]:
    """Seconds of each refusal, and those of a large request's."""
    async with contextlib.AsyncExitStack() as stack:
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(address))
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        if name == "twinplane":
            await stack.enter_async_context(full_queue(stub))
        slots = asyncio.Semaphore(at_once)

        async def refused(request: inference_pb2.GenerateRequest) -> float:
            async with slots:
                started = time.perf_counter()
                call = stub.Generate(request)
                if await call.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise RuntimeError(f"not refused: {await call.code()}")
                return time.perf_counter() - started

        small = inference_pb2.GenerateRequest(text="Once upon a time, far away")
        await refused(small)
        seconds = await asyncio.gather(*(refused(small) for _ in range(requests)))
        return seconds, await refused(inference_pb2.GenerateRequest(text="x" * _LARGE))


@contextlib.asynccontextmanager
async def full_queue(stub: inference_pb2_grpc.InferenceServiceStub) -> AsyncIterator[None]:
    """All rows and all places to wait are taken."""
    calls = [
        stub.Generate(
            inference_pb2.GenerateRequest(
                token_ids=types_pb2.TokenIds(ids=[1, 2, 3]),
                stop=inference_pb2.StopConditions(max_tokens=4_000, ignore_end_of_sequence=True),
            )
        )
        for _ in range(_ROWS + _WAITING)
    ]
    for call in calls:
        await call.read()
    try:
        yield
    finally:
        for call in calls:
            call.cancel()


if __name__ == "__main__":
    main()
