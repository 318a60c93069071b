"""What a decode step of one replica costs the control plane when it has many.

As bench/control_cost.py: the real fleet, cores and message conversion, workers that answer at once,
and a client for each stream, all in one process and loop. Processor time is counted from when all
rows of all replicas decode, and divided by the steps of all replicas. The garbage collector is set
as the control plane sets it. One replica is the peer: what a step costs must not depend on how many
others there are.

    python -m bench.fleet_cost [--replicas 1 8 32] [--rows 32] [--steps 150]
"""

from __future__ import annotations

import asyncio
import gc
import random
import time

from bench import options as flags
from bench.control_cost import BLOCK_SIZE, EchoWorker, Samples, ask
from control_plane.core.plan import StepPlan
from control_plane.observability.metrics import Telemetry
from control_plane.shell.fleet import Fleet
from control_plane.shell.replica import ReplicaSettings
from twinplane.process.garbage import settle_collector

CONTEXT = 128
MOST_OF_ONE = 1.2


class Meter:
    """Processor seconds between the decode steps `first` and `last` of all replicas together."""

    def __init__(self, first: int, last: int) -> None:
        self.samples = Samples()
        self.seconds = 0.0
        self._first = first
        self._last = last

    def note(self) -> None:
        """A plan was sent."""
        count = len(self.samples.sent)
        if count == self._first and not self.seconds:
            self.seconds = -time.process_time()
        if count == self._last and self.seconds < 0:
            self.seconds += time.process_time()


class MeteredWorker(EchoWorker):
    """Notes each plan."""

    def __init__(self, rows: int, length: int, meter: Meter, name: str) -> None:
        super().__init__(rows, length, meter.samples, name)
        self._meter = meter

    async def send(self, plan: StepPlan) -> None:
        await super().send(plan)
        self._meter.note()


async def measure(replicas: int, rows: int, steps: int) -> float:
    """Microseconds of processor time for a step of one replica."""
    first, last = 20 * replicas, (steps - 20) * replicas
    meter = Meter(first, last)
    length = CONTEXT + steps + BLOCK_SIZE
    fleet = Fleet(
        [MeteredWorker(rows, length, meter, f"echo{number}") for number in range(replicas)],
        ReplicaSettings(),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("bench"),
        on_readiness=lambda ready: None,
    )
    async with asyncio.TaskGroup() as group:
        running = group.create_task(fleet.run())
        while not all(replica.attached for replica in fleet.replicas):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await ask(fleet, group, rows * replicas, CONTEXT, steps)
        running.cancel()
    assert meter.seconds > 0, "too few steps in which all rows decode"
    return 1e6 * meter.seconds / (last - first)


def main() -> None:
    parser = flags.parser(__doc__, rounds=3, peers=False)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rows", type=int, default=32, help="of each replica")
    parser.add_argument("--steps", type=int, default=150)
    options = parser.parse_args()
    results = flags.open_results("fleet_cost", options)
    gc.collect()
    settle_collector()
    samples: dict[int, list[float]] = {replicas: [] for replicas in options.replicas}
    for _ in range(options.rounds):
        for replicas, taken in samples.items():
            taken.append(asyncio.run(measure(replicas, options.rows, options.steps)))
    measured = {
        replicas: results.measured(f"{options.rows} rows each", f"{replicas} replicas", "us", taken)
        for replicas, taken in samples.items()
    }
    one = measured[options.replicas[0]]
    for many in list(measured.values())[1:]:
        results.compared(many, one, "processor time of a replica's step", at_most=MOST_OF_ONE)
    results.show()


if __name__ == "__main__":
    main()
