"""Kills, stops, cuts off and restarts real workers under load, and looks for what clients notice.

    python -m tests.chaos [kill] [stop] [cut] [restart] [cancel] [--times 200] [--streams 32]

Two worker processes, simulated unless --model names a real one, serve streams of mixed kinds that
go through a control plane in this process. Each stream is compared with an undisturbed run. Prints
a line of JSON for each trial; exits with 1 if a client noticed more than a pause.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from itertools import cycle
from pathlib import Path

import psutil

from tests.chaos.stack import BACK_SECONDS, Stack, control_plane, task_count_of_control_plane
from tests.chaos.streams import Load, asked, cases
from tests.chaos.workers import WorkerProcess, workers
from tests.support.tiny_model import write_tiny_model

TRIALS = ("kill", "stop", "cut", "restart", "cancel")
SIMULATED = ("--simulate", "--simulate-step-ms=10", "--max-model-len=2048", "--max-num-seqs=32")


@dataclass(slots=True)
class Report:
    """What a trial came to. Pauses, in seconds, are those of streams that were with the victim."""

    trial: str
    times: int = 0
    answers: int = 0
    errors: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    idle_again_seconds: float = 0.0
    exit_codes: list[int] = field(default_factory=list)
    orphan_count: int = 0

    @property
    def is_clean(self) -> bool:
        return not (
            self.errors
            or self.changed
            or any(self.exit_codes)
            or self.orphan_count
            or self.idle_again_seconds > BACK_SECONDS
        )

    def line(self) -> str:
        told = asdict(self)
        pauses = sorted(told.pop("pauses"))
        told["errors"], told["changed"] = len(self.errors), len(self.changed)
        told["first_wrong"] = (self.errors + self.changed)[:3]
        told["exit_codes"] = sorted(set(self.exit_codes))
        told["pause_count"] = len(pauses)
        for percent in (50, 99, 100):
            at = min(len(pauses) - 1, len(pauses) * percent // 100)
            told[f"pause_p{percent}"] = round(pauses[at], 3) if pauses else None
        return json.dumps(told)


async def disturb(trial: str, stack: Stack, worker: WorkerProcess, rng: random.Random) -> None:
    """One disturbance of a worker, until it is there again."""
    match trial:
        case "kill":
            await worker.kill()
            await worker.restart()
        case "stop":
            worker.stop()
            await asyncio.sleep(rng.uniform(5.0, 20.0))
            worker.go_on()
        case "cut":
            worker.hole.swallow()
            await asyncio.sleep(rng.uniform(5.0, 20.0))
            worker.hole.open()
        case "restart":
            await worker.leave()
            await worker.start()


async def run_trial(
    trial: str, stack: Stack, made: list[WorkerProcess], options: argparse.Namespace
) -> Report:
    """One trial, from idle to idle."""
    rng = random.Random(f"{trial} {options.seed}")
    asking = await cases(stack, options.streams, options.tokens)
    await stack.idle()
    before, task_count = stack.held(), task_count_of_control_plane()
    report = Report(trial)
    if trial == "cancel":
        is_over = asyncio.Event()
        moving = asyncio.create_task(keep_killing(stack, made, is_over))
        await cancel_many(stack, report, rng, options.times, options.tokens)
        is_over.set()
        await moving
        await stack.attached()
    else:
        load = Load(stack, asking)
        for number in range(options.times):
            await asyncio.sleep(rng.uniform(0.1, 1.0))
            index = number % len(made)
            victims = stack.victims(index)
            moment = time.monotonic()
            await disturb(trial, stack, made[index], rng)
            await stack.attached()
            watches = [watch for watch in load.watches if watch.name in victims]
            # What the next disturbance costs is not this one's.
            within = time.monotonic() - moment
            await asyncio.sleep(0.5)
            pauses = (watch.pause_after(moment, within) for watch in watches)
            report.pauses += [pause for pause in pauses if pause is not None]
            report.times += 1
        await load.stop()
        report.answers = load.done_count
        report.errors, report.changed = load.errors, load.changed
        report.exit_codes = [code for worker in made for code in worker.exit_codes]
    report.idle_again_seconds = round(await stack.idle_again(before, task_count), 3)
    return report


async def keep_killing(stack: Stack, made: list[WorkerProcess], is_over: asyncio.Event) -> None:
    """So that there are moves to cancel in: kills one worker after the other."""
    for worker in cycle(made):
        if is_over.is_set():
            return
        await stack.attached()
        await disturb("kill", stack, worker, random.Random(0))


async def cancel_many(
    stack: Stack, report: Report, rng: random.Random, times: int, tokens: int
) -> None:
    """Clients that leave: before anything, in the queue, in the prompt, between tokens."""

    async def leave(number: int) -> None:
        call = stack.stub.Generate(asked("long prompt", number % 50, tokens), timeout=300)
        reading = asyncio.create_task(_read(call))
        await asyncio.sleep(rng.choice((0.0, 0.001, 0.01, 0.1, rng.uniform(0.0, 1.5))))
        call.cancel()
        await asyncio.wait([reading])
        report.times += 1

    for start in range(0, times, 40):
        numbers = range(start, min(start + 40, times))
        await asyncio.gather(*(leave(number) for number in numbers))


async def _read(call: object) -> None:
    async for _ in call:  # type: ignore[attr-defined]
        pass


async def run(options: argparse.Namespace) -> list[Report]:
    """All trials that were asked for, each with workers and a control plane of its own."""
    reports = []
    for trial in options.trials or TRIALS:
        with tempfile.TemporaryDirectory(prefix="twinplane-chaos-") as name:
            folder = Path(name)
            model, flags = Path(options.model or ""), options.worker_flags
            if not options.model:
                model, flags = write_tiny_model(folder / "model"), list(SIMULATED)
            flags = [f"--model={model}", *flags]
            async with (
                workers(folder, options.replicas, flags) as made,
                control_plane(model, [worker.address for worker in made]) as stack,
            ):
                report = await run_trial(trial, stack, made, options)
        report.orphan_count = sum(
            "worker" in child.cmdline() for child in psutil.Process().children(recursive=True)
        )
        print(report.line(), flush=True)
        reports.append(report)
    return reports


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("trials", nargs="*", help=f"some of {', '.join(TRIALS)}; none: all")
    made.add_argument("--times", type=int, default=200, help="disturbances of each trial")
    made.add_argument("--streams", type=int, default=32)
    made.add_argument("--replicas", type=int, default=2)
    made.add_argument("--tokens", type=int, default=200, help="the most of a stream")
    made.add_argument("--model", help="a folder; without: simulated workers")
    made.add_argument("--worker-flags", nargs="*", default=[], help="of `twinplane worker`")
    made.add_argument("--seed", type=int, default=0)
    return made


def main() -> int:
    options = parser().parse_args()
    logging.disable(logging.CRITICAL)
    reports = asyncio.run(run(options))
    return 0 if all(report.is_clean for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
