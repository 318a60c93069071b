"""Tokens through many client streams: a simulated worker, the real control plane, real clients.

256 gRPC streams from client processes on the same machine. The worker's steps last as told and no
longer. An 8B model in bfloat16 on one H200 needs 12.9 ms at least for 256 sequences, 19.9k tok/s:
steps of 12 ms ask for more than that, steps of 1 ms for all that planes and clients can do. The
rate is counted while all streams run.

How long a token takes from the step's result to its client is taken token by token: the worker
notes when each token was sampled, the client when it had been decoded, both on CLOCK_MONOTONIC,
which the processes of a machine share. So it holds the worker's encoding, both planes' gRPC, the
control plane, and the client's decoding; all of them, the simulation too, share this machine.

    python -m bench.stream_fanout [--streams 256] [--clients 2] [--step-ms 12 1]
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import psutil

from bench import options as flags
from bench.results import Results
from bench.service import Service, control_process, free_port, running

H200_TOKENS_PER_SECOND = 19_900.0
LEAST_TOKENS_PER_SECOND, LONGEST_WAIT_MS = 20_000.0, 100.0
# Steps faster than this ask for more than can be had: then waits say nothing about a served load.
PACED_MS = 5.0
WARM_UP_TOKENS = 32

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Round:
    """One run of all streams. `arrivals` [streams, tokens]; CPU seconds per token of each plane."""

    arrivals: Seconds
    messages: int
    cpu: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """While all streams ran: from the last stream's first token to the first one's last."""
        begin, end = self.arrivals[:, 0].max(), self.arrivals[:, -1].min()
        if end <= begin:
            raise RuntimeError("the streams did not overlap: ask for more --output-tokens")
        return float(((self.arrivals > begin) & (self.arrivals <= end)).sum() / (end - begin))


def main() -> None:
    parser = flags.parser(__doc__, rounds=3, peers=False)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--clients", type=int, default=2, help="client processes")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=384)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[12.0, 1.0])
    options = parser.parse_args()
    results = flags.open_results("stream_fanout", options)
    for step_ms in options.step_ms:
        with TemporaryDirectory(prefix="twinplane-") as folder:
            record(options, results, step_ms, *measure(options, Path(folder), step_ms))
    results.show()


def measure(
    options: argparse.Namespace, folder: Path, step_ms: float
) -> tuple[list[Round], Seconds]:
    """The rounds, and when each token was sampled, [rounds * streams, tokens]."""
    socket, stamps = folder / "worker.sock", folder / "sampled.npy"
    numbered = (options.rounds + 1) * options.streams
    worker_command = [
        sys.executable, "-m", "bench.simulated_worker", str(socket), str(stamps),
        str(options.streams), str(step_ms), str(numbered),
    ]  # fmt: skip
    worker_address = f"unix:{socket}"
    rounds = []
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(running(worker_command, worker_address))
        control = stack.enter_context(
            control_process(free_port(), "--model", options.model, "--worker", worker_address)
        )
        for number in range(options.rounds + 1):
            tokens = options.output_tokens if number else WARM_UP_TOKENS
            run = run_clients(options, folder, worker, control, number, tokens)
            if number:
                rounds.append(run)
    sampled = np.load(stamps)
    return rounds, sampled[options.streams :, : options.output_tokens]


def run_clients(
    options: argparse.Namespace,
    folder: Path,
    worker: Service,
    control: Service,
    number: int,
    tokens: int,
) -> Round:
    """All client processes at once, to their end."""
    before = [cpu_seconds(plane.pid) for plane in (worker, control)]
    share = options.streams // options.clients
    outputs = [folder / f"client-{place}.npy" for place in range(options.clients)]
    processes = [
        psutil.Popen(
            [
                sys.executable, "-m", "bench.fanout_client", control.address, str(output),
                *map(str, (number * options.streams + place * share, share)),
                *map(str, (options.prompt_tokens, tokens)),
            ]
        )
        for place, output in enumerate(outputs)
    ]  # fmt: skip
    for process in processes:
        if process.wait(300):
            raise subprocess.CalledProcessError(process.returncode, "bench.fanout_client")
    after = [cpu_seconds(plane.pid) for plane in (worker, control)]
    arrivals, messages = [], 0
    for output in outputs:
        with output.open("rb") as source:
            arrivals.append(np.load(source))
            messages += int(np.load(source).sum())
    total = share * options.clients * tokens
    spent = {
        name: 1e6 * (end - begin) / total
        for name, begin, end in zip(("worker", "control"), before, after, strict=True)
    }
    return Round(np.concatenate(arrivals), messages, spent)


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def record(
    options: argparse.Namespace,
    results: Results,
    step_ms: float,
    rounds: list[Round],
    sampled: Seconds,
) -> None:
    """Rates, waits, and what the planes spent."""
    case = f"{options.streams} streams, steps of {step_ms:g} ms"
    tokens = options.streams * options.output_tokens
    rate = results.measured(
        case, "twinplane", "tok/s", [each.tokens_per_second for each in rounds],
        tokens_per_message=tokens / statistics.median(each.messages for each in rounds),
        control_cpu_us_per_token=statistics.median(each.cpu["control"] for each in rounds),
        worker_cpu_us_per_token=statistics.median(each.cpu["worker"] for each in rounds),
    )  # fmt: skip
    waits = [
        1e3 * (each.arrivals - sampled[place * options.streams :][: options.streams])
        for place, each in enumerate(rounds)
    ]
    p50, p99 = (
        results.measured(
            case, f"result to client, {name}", "ms",
            [float(np.percentile(each, percent)) for each in waits],
        )
        for name, percent in (("median", 50), ("p99", 99))
    )  # fmt: skip
    assert p50.median >= 0, "the two clocks differ"
    paced = step_ms >= PACED_MS
    results.ratio(
        case, "twinplane", "8B on H200, 19.9k tok/s", "rate",
        rate.median / H200_TOKENS_PER_SECOND,
        at_least=LEAST_TOKENS_PER_SECOND / H200_TOKENS_PER_SECOND if paced else None,
    )  # fmt: skip
    results.ratio(
        case, "p99, result to client", "100 ms", "time", p99.median / LONGEST_WAIT_MS,
        at_most=1.0 if paced else None,
    )  # fmt: skip


if __name__ == "__main__":
    main()
