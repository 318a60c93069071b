"""What workers that have nothing to do cost the control plane: part of a core, and memory.

The control plane is a process as users start it. The workers are real ones with simulated devices,
many in one process, each with a socket, an id and an incarnation of its own. The window begins when
all are attached and have been left alone for a while.

    python -m bench.idle_fleet [--workers 256] [--seconds 30]
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from bench import options as flags
from bench.service import control_process, free_port
from twinplane import Client, WorkerState
from twinplane.models import SIMULATED_MODEL
from twinplane.process.event_loop import new_event_loop
from twinplane.process.stop_signals import StopSignals
from twinplane.settings.worker import WorkerConfig
from worker_service.app import serve
from worker_service.startup import start_runner

PER_PROCESS = 64
CALM_SECONDS = 10.0
JOIN_SECONDS = 180.0
MOST_PERCENT = 2.0
MOST_MEGABYTES = 200.0
MEGA = 1e6


@dataclass(frozen=True, slots=True)
class Idle:
    """Of the control plane's process: percent of one core, and resident bytes."""

    percent: float
    resident_bytes: int


async def host(sockets: Sequence[str]) -> None:
    """Serves a simulated worker on each socket until a signal comes."""
    with StopSignals(watch_stdin=False) as signals:
        async with asyncio.TaskGroup() as group:
            for path in sockets:
                config = WorkerConfig(
                    model=SIMULATED_MODEL,
                    uds=path,
                    worker_id=Path(path).stem,
                    simulate=True,
                    drain_seconds=1.0,
                )
                build = partial(start_runner, config, _quiet)
                group.create_task(serve(config, signals.first, build))


def _quiet(line: str) -> None:
    """Loading is not reported."""


@contextlib.contextmanager
def workers(folder: Path, count: int) -> Iterator[Sequence[str]]:
    """So many workers, in as few processes as may hold them; their sockets."""
    sockets = [str(folder / f"w{number}.sock") for number in range(count)]
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "bench.idle_fleet",
                "--host",
                *sockets[first : first + PER_PROCESS],
            ]
        )
        for first in range(0, count, PER_PROCESS)
    ]
    try:
        yield sockets
    finally:
        for process in processes:
            process.send_signal(signal.SIGTERM)
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def measure(count: int, seconds: float, calm: float = CALM_SECONDS) -> Idle:
    """Raises RuntimeError if not all workers attach."""
    with tempfile.TemporaryDirectory(prefix="idle") as name:
        folder = Path(name)
        with workers(folder, count) as sockets:
            listed = folder / "workers"
            listed.write_text("".join(f"unix:{path}\n" for path in sockets))
            port = free_port()
            with control_process(
                port,
                "--model",
                SIMULATED_MODEL,
                "--workers-file",
                str(listed),
                timeout=JOIN_SECONDS,
            ) as service:
                _await_all(service.address, count)
                process = psutil.Process(service.pid)
                time.sleep(calm)
                began, before = time.monotonic(), process.cpu_times()
                time.sleep(seconds)
                after, took = process.cpu_times(), time.monotonic() - began
                used = after.user + after.system - before.user - before.system
                return Idle(100.0 * used / took, process.memory_info().rss)


def _await_all(address: str, count: int) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    with Client(address) as client:
        while True:
            attached = sum(worker.state is WorkerState.ATTACHED for worker in client.list_workers())
            if attached == count:
                return
            if time.monotonic() > deadline:
                raise RuntimeError(f"{attached} of {count} workers are attached")
            time.sleep(0.5)


def main() -> None:
    parser = flags.parser(__doc__, rounds=1, peers=False)
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=30.0, help="length of the window")
    parser.add_argument("--host", nargs="+", metavar="SOCKET", help="be a process of workers")
    options = parser.parse_args()
    if options.host:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(host(options.host))
        return
    results = flags.open_results("idle_fleet", options)
    taken = [measure(options.workers, options.seconds) for _ in range(options.rounds)]
    case = f"{options.workers} idle workers"
    percent = results.measured(
        case, "control plane", "% of a core", [each.percent for each in taken]
    )
    resident = results.measured(
        case, "control plane", "MB", [each.resident_bytes / MEGA for each in taken]
    )
    for what, measured, most in (
        ("processor time", percent, MOST_PERCENT),
        ("resident memory", resident, MOST_MEGABYTES),
    ):
        bar = f"{most:g} {measured.unit}"
        results.ratio(case, "control plane", bar, what, measured.median / most, at_most=1.0)
    results.show()


if __name__ == "__main__":
    main()
