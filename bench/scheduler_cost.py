"""Microseconds of scheduler work per decode step: schedule() + update(), with no model behind them.

Every sequence has a 256-token prompt and max_tokens 600, blocks hold 16 tokens, prefix caching is
on; the median of 200 steps in which every sequence decodes is printed, one JSON line per running
count. With --vllm-python and --model the same is asked of vLLM's scheduler by the peer script given
as --vllm-script, count by count and alternating with ours, and the ratio is printed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

from control_plane.core.plan import StepPlan, StepResult, WeightVersion
from control_plane.core.request import Request, RequestId
from control_plane.core.sampling_params import SamplingParams, StopConditions
from control_plane.core.scheduler import Scheduler, SchedulerConfig

PROMPT_TOKENS = 256
MAX_TOKENS = 600
BLOCK_SIZE = 16
STEPS = 200


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
        scheduler.submit(
            Request(
                request_id=RequestId(f"r{index}"),
                prompt_token_ids=tuple((index * 7 + i) % 40000 for i in range(PROMPT_TOKENS)),
                sampling=SamplingParams(temperature=0.0),
                seed=index,
                stop=StopConditions(max_tokens=MAX_TOKENS),
                arrival=0.0,
            )
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
    return StepResult(plan.epoch, plan.step_id, rows, [1] * len(rows), [5] * len(rows))


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


def measure_vllm(python: str, script: str, model: str, running: int) -> float:
    """The same of vLLM, by the peer script in its own environment."""
    done = subprocess.run(
        [python, script, model, str(running)], capture_output=True, text=True, check=True
    )
    return float(json.loads(done.stdout.strip().splitlines()[-1])["us_per_step"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("running", type=int, nargs="*", default=[1, 64, 256, 1024])
    parser.add_argument("--inflight", type=int, default=1, help="plans ahead of results")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--vllm-script", help="the peer script, run as SCRIPT MODEL RUNNING")
    parser.add_argument("--model", help="model folder for vLLM's configuration")
    options = parser.parse_args()
    peer = (options.vllm_python, options.vllm_script, options.model)
    if any(peer) and not all(peer):
        parser.error("--vllm-python, --vllm-script and --model go together")
    for running in options.running:
        ours = measure(running, options.inflight)
        line: dict[str, object] = {
            "ours": "twinplane",
            "running": running,
            "us_per_step": round(ours, 1),
        }
        if all(peer):
            theirs = measure_vllm(*peer, running)
            ours = statistics.mean((ours, measure(running, options.inflight)))
            line |= {"vllm_us_per_step": round(theirs, 1), "ratio": round(theirs / ours, 2)}
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
