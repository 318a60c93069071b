"""What adapters cost: 32 rows with a LoRA adapter each, against the base model on the same worker.

One runner, without a network. The contestants take turns within each round, and a round's ratio is
that of two runs next to each other, so that it says something on a busy machine, too. An adapter
changes every projection of every layer, and is kept in the format that it came in.

    python -m bench.adapters [--rows 32] [--rank 16] [--quantization int8]
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import torch

from bench import options as flags
from bench.load import random_prompts
from tests.support.runner_rig import GREEDY, RunnerRig
from twinplane import models
from worker_service.domain.adapters import (
    Adapter,
    AdapterDescription,
    AdapterLimits,
    LowRankPair,
    StoredTensor,
)
from worker_service.domain.weights import TensorDescription
from worker_service.runner.load import load_runner
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.options import Quantization, RunnerOptions

PROMPT_TOKENS, STEPS, VOCABULARY = 64, 16, 49152
FORMATS = {"F32": torch.float32, "BF16": torch.bfloat16}
_AT_LEAST = 0.75  # of the base model's throughput, 32 adapters of rank 16 in 32 rows


@dataclass(frozen=True, slots=True)
class Contestant:
    """A batch: the slot of each row."""

    name: str
    slots: tuple[int, ...]


def main() -> None:
    parser = flags.parser(__doc__, rounds=15, peers=False)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--quantization", choices=["none", "int8"], default="none")
    options = parser.parse_args()
    results = flags.open_results("adapters", options)
    rows, rank = options.rows, options.rank
    limits = AdapterLimits(len(FORMATS) * rows, rank)
    runner = load_runner(_options(options, limits))
    results.note(f"{runner.capability().executor}, {options.threads} threads")
    contestants = [Contestant("base", (0,) * rows)]
    for index, kept in enumerate(FORMATS):
        first = 1 + index * rows
        for slot in range(first, first + rows):
            _load(runner, slot, rank, kept)
        own = tuple(range(first, first + rows))
        contestants.append(Contestant(f"an adapter each, {kept}", own))
        contestants.append(Contestant(f"one adapter, {kept}", (first,) * rows))
    contestants.append(Contestant("one row of them with one", (1, *(0,) * (rows - 1))))
    taken = rounds(runner, contestants, options.rounds)
    case = f"{rows} rows, rank {rank}"
    for each in contestants:
        rates = [rows * STEPS / seconds for seconds in taken[each.name]]
        results.measured(case, each.name, "output tok/s", rates)
    usual = (rows, rank, options.quantization) == (32, 16, "none")
    for each in contestants[1:]:
        pairs = zip(taken["base"], taken[each.name], strict=True)
        ratio = statistics.median(base / own for base, own in pairs)
        results.ratio(
            case,
            each.name,
            "base",
            "throughput",
            ratio,
            at_least=_AT_LEAST if usual and len(set(each.slots)) == rows else None,
        )
    results.show()


def rounds(
    runner: ModelRunner, contestants: list[Contestant], count: int
) -> dict[str, list[float]]:
    """Seconds of each contestant's decoding steps, after a round that is not measured."""
    seconds: dict[str, list[float]] = {each.name: [] for each in contestants}
    for number in range(count + 1):
        for each in contestants:
            spent = decode(runner, each, number)
            if number:
                seconds[each.name].append(spent)
    return seconds


def decode(runner: ModelRunner, contestant: Contestant, seed: int) -> float:
    """Seconds of STEPS steps of one token for each row, behind their prompts."""
    rig = RunnerRig(runner)
    count = len(contestant.slots)
    prompts = random_prompts(count, PROMPT_TOKENS, VOCABULARY, seed)
    for row, (prompt, slot) in enumerate(zip(prompts, contestant.slots, strict=True)):
        rig.add(row, prompt, GREEDY, adapter_slot=slot)
    rig.step(dict.fromkeys(range(count), PROMPT_TOKENS))
    started = time.perf_counter()
    for _ in range(STEPS):
        rig.step(dict.fromkeys(range(count), 1))
    return time.perf_counter() - started


def _load(runner: ModelRunner, slot: int, rank: int, kept: str) -> None:
    """Puts a random adapter into a slot."""
    modules, pairs = runner.adapters.modules, {}
    assert modules is not None
    for name, (outputs, inputs) in modules.items():
        a, b = _random(name, (rank, inputs), kept), _random(name, (outputs, rank), kept)
        pairs[name] = LowRankPair(a, b, 0.1)
    adapter = Adapter(AdapterDescription(f"{slot:064}", rank, 0.1, ()), pairs)
    runner.adapters.prepare(adapter)
    runner.adapters.put(slot, adapter)


def _random(name: str, shape: tuple[int, int], kept: str) -> StoredTensor:
    numbers = (0.02 * torch.randn(shape)).to(FORMATS[kept])
    data = bytearray(numbers.view(torch.uint8).numpy().tobytes())
    return StoredTensor(TensorDescription(name, kept, shape), data)


def _options(options: argparse.Namespace, limits: AdapterLimits) -> RunnerOptions:
    return RunnerOptions(
        model_folder=models.resolve(options.model),
        model_name=options.model,
        device="cpu",
        data_type=None,
        block_size=16,
        kv_cache_bytes=256 << 20,
        max_sequence_count=options.rows,
        max_step_token_count=options.rows * PROMPT_TOKENS,
        max_sequence_token_count=512,
        executor="compiled",
        attention_backend=None,
        thread_count=options.threads,
        random_seed=0,
        progress=lambda line: None,
        quantization=Quantization(options.quantization),
        adapter_limits=limits,
    )


if __name__ == "__main__":
    main()
