"""Rollouts under streams, undisturbed or with processes that are killed, and what came of them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from tests.rollouts.stack import CONTROL, IDLE, Operator, Stack, stack
from tests.rollouts.streams import Ask, Checker, Load, Seen, Settled, make_ask
from tests.support.tiny_model import write_tiny_model
from twinplane.control.v1 import control_pb2 as pb

FINISH = pb.IN_FLIGHT_POLICY_FINISH_ON_OLD
CONTINUE = pb.IN_FLIGHT_POLICY_CONTINUE_ON_NEW
KEEP = pb.IN_FLIGHT_POLICY_KEEP_KV
ABORT = pb.IN_FLIGHT_POLICY_ABORT
WAYS = tuple(
    product(
        (FINISH, CONTINUE, KEEP, ABORT),
        (pb.ROLLOUT_STRATEGY_ROLLING, pb.ROLLOUT_STRATEGY_ALL_AT_ONCE),
    )
)
SIMULATED = ("--simulate", "--simulate-step-ms=10", "--max-model-len=2048", "--max-num-seqs=32")
VERSIONS = ("one", "two", "three")
_TENSOR_BYTES = 32 << 20
_MOST_GROWTH_BYTES = 64 << 20
"""Of a process, over a whole trial: two copies of the weights would be as much."""


@dataclass(slots=True)
class Report:
    """What a trial came to. All times are in seconds.

    `pauses`: of streams whose tokens are of other weights afterwards. `updates`: from asking until
    all is settled. `commit_mean`: for how long a commit held up a worker's steps.
    """

    trial: str
    ends: Counter[str] = field(default_factory=Counter)
    reasons: list[str] = field(default_factory=list)
    answers: int = 0
    aborted: int = 0
    mixed: int = 0
    kept: int = 0
    wrong: list[str] = field(default_factory=list)
    pauses: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    commit_mean: float = 0.0
    growth_bytes: list[int] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is wrong."""
        return not self.wrong

    def line(self) -> str:
        """The figures in a line of JSON."""
        told = {
            "trial": self.trial,
            "updates": sum(self.ends.values()),
            "ends": dict(self.ends),
            "reasons": sorted(set(self.reasons))[:5],
            "answers": self.answers,
            "aborted": self.aborted,
            "of_several_versions": self.mixed,
            "with_kv_of_other_weights": self.kept,
            "wrong": len(self.wrong),
            "first_wrong": [each[:600] for each in self.wrong[:5]],
            "pause_count": len(self.pauses),
            "commit_mean": round(self.commit_mean, 5),
            "growth_mb": [round(each / 1e6, 1) for each in self.growth_bytes],
        }
        for name, values in (
            ("pause", self.pauses), ("any_gap", self.gaps), ("update", self.updates)
        ):  # fmt: skip
            for percent in (50, 99, 100):
                told[f"{name}_p{percent}"] = percentile(values, percent)
        return json.dumps(told)


def percentile(values: Sequence[float], percent: int) -> float | None:
    """Of so many, rounded to milliseconds; None of none."""
    ordered = sorted(values)
    at = min(len(ordered) - 1, len(ordered) * percent // 100)
    return round(ordered[at], 4) if ordered else None


def write_versions(weights: Path) -> None:
    """Some weights for simulated workers, which look at nothing but their digests."""
    for number, name in enumerate(VERSIONS):
        rng = np.random.default_rng(number)
        (weights / name).mkdir(parents=True)
        tensors = {"w": rng.integers(0, 256, _TENSOR_BYTES, dtype=np.uint8)}
        save_file(tensors, weights / name / "model.safetensors")


async def simulated_trial(
    trial: str, folder: Path, *, times: int, streams: int, tokens: int, seed: int
) -> Report:
    """`update` or `kill`, from idle to idle."""
    report = Report(trial)
    model, weights = write_tiny_model(folder / "model"), folder / "weights"
    await asyncio.to_thread(write_versions, weights)
    async with stack(folder, model, weights, SIMULATED) as server, server.operating() as operator:
        first = (await operator.settled()).replicas[0].digest
        checker = Checker(Tokenizer.from_file(str(model / "tokenizer.json")), first)
        draw = random.Random(f"{trial} {seed}")
        settled = Settled(first)

        def ask(number: int, turn: int) -> Ask:
            return make_ask(random.Random(f"{seed}/{number}/{turn}"), 256, tokens)

        # Files are known of these from here on: with those of the start, nobody could be brought
        # back to them.
        await update(operator, settled, report, VERSIONS[0], WAYS[0])
        load = Load(server.address, settled, streams, ask)
        before: list[int] = []
        for number in range(times):
            name, way = VERSIONS[(number + 1) % len(VERSIONS)], WAYS[number % len(WAYS)]
            await asyncio.sleep(draw.uniform(0.05, 0.5))
            if trial == "kill":
                await _update_and_kill(server, operator, settled, report, name, way, draw)
            else:
                await update(operator, settled, report, name, way)
            if number == min(times // 2, 8):  # all has been used by then
                before = server.resident_bytes()
        await load.stop()
        await ended(server, report, before if trial == "update" else [])
        _judge(report, checker, load.seen, kills=trial == "kill")
    return report


async def update(
    operator: Operator, settled: Settled, report: Report, name: str, way: tuple[int, int]
) -> None:
    began = time.monotonic()
    policy, strategy = way
    settled.digest = ""
    settled.policies.append(policy)
    await operator.update(name, name, strategy, policy)
    state = await operator.settled()
    report.updates.append(time.monotonic() - began)
    _note(report, state, settled)
    if state.rollout.state != pb.ROLLOUT_STATE_DONE:
        report.wrong.append(f"update to {name}: {state}")


async def _update_and_kill(
    server: Stack,
    operator: Operator,
    settled: Settled,
    report: Report,
    name: str,
    way: tuple[int, int],
    draw: random.Random,
) -> None:
    began = time.monotonic()
    policy, strategy = way
    settled.digest = ""
    settled.policies.append(policy)
    rollout_id = await operator.update(name, name, strategy, policy)
    # Most phases take milliseconds: half of the kills hit these, the others any wait.
    usual = percentile(report.updates, 50) or 1.0
    await asyncio.sleep(draw.uniform(0.0, draw.choice([0.15, max(0.15, usual)])))
    victim = draw.choice((CONTROL, *range(len(server.workers))))
    await asyncio.to_thread(server.kill, victim)
    state = await operator.settled()
    report.updates.append(time.monotonic() - began)
    _note(report, state, settled)
    which = f"{name}, victim {victim}, {pb.InFlightPolicy.Name(policy)}"
    if state.rollout.rollout_id != rollout_id:
        report.wrong.append(f"{which}: the rollout is forgotten")
    if state.rollout.state != pb.ROLLOUT_STATE_DONE:
        report.reasons.append(state.rollout.reason)
        if not state.rollout.reason:
            report.wrong.append(f"{which}: it does not say why: {state}")


def _note(report: Report, state: pb.WeightsState, settled: Settled) -> None:
    """What all replicas have now."""
    rollout = state.rollout
    report.ends[pb.RolloutState.Name(rollout.state).removeprefix("ROLLOUT_STATE_").lower()] += 1
    digests = {each.digest for each in state.replicas}
    is_done = rollout.state == pb.ROLLOUT_STATE_DONE
    goal = rollout.target if is_done else rollout.before
    if digests != {goal.digest}:
        report.wrong.append(f"neither all old nor all new: {state}")
    else:
        settled.digest = goal.digest


async def ended(server: Stack, report: Report, before: Sequence[int]) -> None:
    """Looks for what is left when nobody asks any more."""
    if (held := await server.idle_again()) != IDLE:
        report.wrong.append(f"it holds {held}")
    if children := server.child_count():
        report.wrong.append(f"workers have {children} processes")
    count = sum(server.samples(n, "worker_weight_update_pause_seconds_count") for n in (0, 1))
    total = sum(server.samples(n, "worker_weight_update_pause_seconds_sum") for n in (0, 1))
    report.commit_mean = total / count if count else 0.0
    if before:
        now = server.resident_bytes()
        report.growth_bytes = [end - begin for end, begin in zip(now, before, strict=True)]
        if max(report.growth_bytes) > _MOST_GROWTH_BYTES:
            report.wrong.append(f"processes have grown by {report.growth_bytes}")
    report.wrong += server.tracebacks()


def _judge(report: Report, checker: Checker, seen: Sequence[Seen], *, kills: bool) -> None:
    """Checks each answer."""
    for one in seen:
        if (trouble := checker.trouble(one, kills=kills)) is not None:
            report.wrong.append(f"{trouble}; policies {sorted(one.policies)}: {one.ask}")
    judge_counts(report, seen)


def judge_counts(report: Report, seen: Sequence[Seen]) -> None:
    """Counts the answers."""
    for one in seen:
        report.answers += one.result is not None
        report.aborted += one.error is not None
        report.gaps += one.gaps
        report.pauses += one.switches
        if one.result is not None:
            report.mixed += len({span.weights_digest for span in one.result.weights_spans}) > 1
            report.kept += any(span.kv_of_other_weights for span in one.result.weights_spans)
