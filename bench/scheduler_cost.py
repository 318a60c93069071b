"""Microseconds of scheduler work per decode step: schedule() + update(), with no model behind them.

Every sequence has a 256-token prompt and max_tokens 600, blocks hold 16 tokens, prefix caching is
on; the median of 200 steps in which every sequence decodes is taken. The peer is vLLM's scheduler
under the same load, count by count and alternating with ours.

    python -m bench.scheduler_cost --peers DIR [--running 1 64 256 1024]
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from array import array
from pathlib import Path

from bench import options as flags
from control_plane.core.config import SchedulerConfig
from control_plane.core.plan import StepPlan, StepResult, WeightVersion
from control_plane.core.request import (
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
)
from control_plane.core.scheduler import Scheduler
from control_plane.core.tokens import Tokens
from twinplane.models import resolve

PROMPT_TOKENS = 256
MAX_TOKENS = 600
BLOCK_SIZE = 16
STEPS = 200
PEER_SCRIPT = Path(__file__).parent / "peers" / "vllm_scheduler.py"


def build(running: int, inflight: int) -> Scheduler:
    """A scheduler with `running` requests of distinct prompts in its queue."""
    config = SchedulerConfig(
        max_sequence_count=running,
        max_step_token_count=8192,
        max_sequence_token_count=4096,
        block_count=max(running * 60 + 100, 4096 // BLOCK_SIZE + 1),
        block_size=BLOCK_SIZE,
        max_waiting_count=running,
        max_inflight_step_count=inflight,
    )
    scheduler = Scheduler(config, epoch=1, weight_version=WeightVersion(1, "0" * 64))
    for index in range(running):
        scheduler.add(
            SequenceId(index),
            Request(
                request_id=RequestId(f"r{index}"),
                prompt_token_ids=array(
                    "I", ((index * 7 + i) % 40000 for i in range(PROMPT_TOKENS))
                ),
                sampling=SamplingParams(temperature=0.0),
                seed=index,
                stop=StopConditions(max_tokens=MAX_TOKENS),
                arrival=0.0,
            ),
        )
    return scheduler


def answer(plan: StepPlan, prompt_tokens: int) -> StepResult:
    """Token 5 for every row whose prompt is complete."""
    columns = plan.scheduled
    rows = [
        row
        for row, start, count in zip(
            columns.rows, columns.start_positions, columns.token_counts, strict=True
        )
        if start + count >= prompt_tokens
    ]
    return StepResult(plan.epoch, plan.step_id, rows, [1] * len(rows), Tokens([5] * len(rows)))


def measure(running: int, inflight: int) -> float:
    """Median microseconds of one schedule() and one update() with all rows decoding."""
    scheduler = build(running, inflight)
    plans: list[StepPlan] = []
    seconds: list[float] = []
    while len(seconds) < STEPS:
        started = time.perf_counter()
        plan = scheduler.schedule(started)
        scheduled = time.perf_counter() - started
        if plan is not None:
            plans.append(plan)
        if len(plans) < inflight and not seconds and plan is not None:
            continue
        oldest = plans.pop(0)
        result = answer(oldest, PROMPT_TOKENS)
        started = time.perf_counter()
        outputs = scheduler.update(result)
        updated = time.perf_counter() - started
        decoding = plan is not None and plan.scheduled.token_counts == [1] * running
        if decoding and len(outputs) == running:
            seconds.append(scheduled + updated)
    return 1e6 * statistics.median(seconds)


class VllmScheduler:
    """vLLM's, in a process of its own environment that waits for jobs."""

    def __init__(self, python: Path, model_folder: Path) -> None:
        self._process = subprocess.Popen(
            [python, PEER_SCRIPT, model_folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def measure(self, running: int) -> float:
        """As ours."""
        assert self._process.stdin and self._process.stdout
        job = {
            "running": running,
            "prompt_tokens": PROMPT_TOKENS,
            "max_tokens": MAX_TOKENS,
            "block_size": BLOCK_SIZE,
            "steps": STEPS,
        }
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                return float(json.loads(line)["us_per_step"])
        raise RuntimeError("vLLM's scheduler died: run bench/peers/vllm_scheduler.py by hand")

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    parser = flags.parser(__doc__, rounds=2)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 256, 1024])
    parser.add_argument("--inflight", type=int, default=1, help="plans ahead of results")
    options = parser.parse_args()
    results = flags.open_results("scheduler_cost", options)
    peer: VllmScheduler | None = None
    if options.peers is not None:
        python = options.peers / "vllm" / "bin" / "python"
        peer = VllmScheduler(python, resolve(options.model))
    for running in options.running:
        case, ours, theirs = f"{running} running", list[float](), list[float]()
        for _ in range(options.rounds):
            ours.append(measure(running, options.inflight))
            if peer is not None:
                theirs.append(peer.measure(running))
        own = results.measured(case, "twinplane", "us", ours)
        if peer is not None:
            other = results.measured(case, "vllm", "us", theirs)
            bound = 0.2 if running >= 256 else None
            results.compared(own, other, "time of schedule + update", at_most=bound)
    if peer is not None:
        peer.close()
    results.show()


if __name__ == "__main__":
    main()
