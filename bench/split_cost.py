"""What the split costs: the same runner in this process, and in a worker process over Execute.

In process, the facade and the device thread share the controller's process (bench.inprocess):
messages are encoded and decoded, but cross no socket, no gRPC and no other process. Over the
Execute stream the worker is a process of its own, on loopback TCP or on a Unix socket. The same
driver and core drive all three in turn, without clients' gRPC. The ratio is of output rates. One
turn varies more than the split costs, on a machine that is not ours alone by a tenth: hence many.

    python -m bench.split_cost [--streams 1 8 32] [--quantization int8]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from tempfile import TemporaryDirectory

from bench import fleet
from bench import options as flags
from bench.inprocess import InProcessWorker
from bench.load import random_prompts
from bench.results import Results
from bench.service import free_port, worker_process
from control_plane.rpc.worker_client import GrpcWorker
from control_plane.shell.ports import Worker
from twinplane.process.event_loop import new_event_loop
from twinplane.settings.worker import WorkerConfig
from worker_service.facade import WorkerFacade
from worker_service.startup import start_runner

VOCABULARY = 40_000
IN_PROCESS = "in process"


def main() -> None:
    parser = flags.parser(__doc__, rounds=15, peers=False)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--quantization", default=None, choices=["int8"])
    options = parser.parse_args()
    results = flags.open_results(
        "split_cost" if options.quantization is None else f"split_cost_{options.quantization}",
        options,
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(measure(options, results))
    results.show()


@contextlib.asynccontextmanager
async def in_process(options: argparse.Namespace) -> AsyncIterator[Worker]:
    """A worker whose runner is in this process."""
    quantization = {} if options.quantization is None else {"quantization": options.quantization}
    config = WorkerConfig(model=options.model, **quantization)
    facade = WorkerFacade(
        lambda: start_runner(config, lambda line: None), worker_id="bench", incarnation_id="1"
    )
    try:
        await facade.load()
        yield InProcessWorker(facade)
    finally:
        await facade.close()


async def measure(options: argparse.Namespace, results: Results) -> None:
    weights = [] if options.quantization is None else ["--quantization", options.quantization]
    common = ["--model", options.model, *weights]
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="twinplane-")))
        port, socket = free_port(), folder / "worker.sock"
        stack.enter_context(worker_process(f"127.0.0.1:{port}", "--port", str(port), *common))
        stack.enter_context(worker_process(f"unix:{socket}", "--uds", str(socket), *common))
        workers: dict[str, Worker] = {
            IN_PROCESS: await stack.enter_async_context(in_process(options)),
            "Execute, TCP": GrpcWorker(f"127.0.0.1:{port}", controller_id="bench"),
            "Execute, Unix socket": GrpcWorker(f"unix:{socket}", controller_id="bench"),
        }
        fleets = {
            name: await stack.enter_async_context(fleet.running(worker))
            for name, worker in workers.items()
        }
        for made in fleets.values():
            await made.generate(random_prompts(8, 16, VOCABULARY, seed=0), 8)
        for streams in options.streams:
            await contest(options, results, fleets, streams)


async def contest(
    options: argparse.Namespace,
    results: Results,
    fleets: dict[str, fleet.RunningFleet],
    streams: int,
) -> None:
    """Each in turn, in an order that changes by the round: what comes first finds a warmer core."""
    rates: dict[str, list[float]] = {name: [] for name in fleets}
    order = list(fleets)
    shuffled = random.Random(streams)
    for number in range(options.rounds):
        seed = 1000 * streams + number
        prompts = random_prompts(streams, options.prompt_tokens, VOCABULARY, seed)
        shuffled.shuffle(order)
        for name in order:
            # The same prompts are new to each: every fleet has a prefix cache of its own.
            seconds = await fleets[name].generate(prompts, options.output_tokens)
            rates[name].append(streams * options.output_tokens / seconds)
    case = f"{streams} streams, {options.prompt_tokens} + {options.output_tokens} tokens"
    measured = {
        name: results.measured(case, name, "output tok/s", taken) for name, taken in rates.items()
    }
    lost = 0.06 if options.quantization and streams == 1 else 0.03
    for name in order:
        if name != IN_PROCESS:
            results.compared(measured[name], measured[IN_PROCESS], "output rate", at_least=1 - lost)


if __name__ == "__main__":
    main()
