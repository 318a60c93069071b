"""A simulated worker that notes when each token's step was done, for bench/stream_fanout.py.

usage: python -m bench.simulated_worker SOCKET OUTPUT ROWS STEP_MS PLACE_COUNT

The first token of a prompt names its stream. On SIGINT the seconds (CLOCK_MONOTONIC, which all
processes of a machine share) at which each stream's tokens were sampled go to OUTPUT as an array
[PLACE_COUNT, longest], NaN after the last.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import numpy as np

from twinplane.process.event_loop import new_event_loop
from twinplane.process.stop_signals import StopSignals
from twinplane.settings.worker import WorkerConfig
from worker_service.app import serve
from worker_service.domain.capability import Capability, MemoryPool
from worker_service.domain.plan import SamplePlan, StepPlan
from worker_service.runner.interface import PendingStep, Runner
from worker_service.startup import start_runner


class StampingRunner:
    """A Runner around a runner."""

    def __init__(self, runner: Runner, stream_count: int) -> None:
        self.stamps: list[list[float]] = [[] for _ in range(stream_count)]
        self._runner = runner
        self._streams: dict[int, int] = {}

    def capability(self) -> Capability:
        return self._runner.capability()

    def memory_pool(self) -> MemoryPool:
        return self._runner.memory_pool()

    def reset(self) -> None:
        self._runner.reset()

    def launch(self, plan: StepPlan) -> PendingStep:
        for added in plan.added:
            self._streams[added.row] = int(added.token_ids[0])
        pending = self._runner.launch(plan)
        rows = pending.result().rows
        now = time.monotonic()
        for row in rows.tolist():
            self.stamps[self._streams[row]].append(now)
        return pending

    def launch_sample(self, plan: SamplePlan) -> PendingStep:
        return self._runner.launch_sample(plan)


async def run(config: WorkerConfig, output: Path, stream_count: int) -> None:
    runners: list[StampingRunner] = []

    def build() -> Runner:
        runners.append(StampingRunner(start_runner(config, lambda line: None), stream_count))
        return runners[0]

    with StopSignals(watch_stdin=False) as signals:
        await serve(config, signals.first, build)
    stamps = runners[0].stamps
    table = np.full((stream_count, max(map(len, stamps))), np.nan)
    for row, times in zip(table, stamps, strict=True):
        row[: len(times)] = times
    with output.open("wb") as sink:
        np.save(sink, table)


def main() -> None:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    socket, output, rows, step_ms, stream_count = sys.argv[1:]
    config = WorkerConfig(
        uds=socket,
        simulate=True,
        max_num_seqs=int(rows),
        simulate_step_ms=float(step_ms),
        simulate_token_us=0.0,
        simulate_kilotoken_us=0.0,
    )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(config, Path(output), int(stream_count)))


if __name__ == "__main__":
    main()
