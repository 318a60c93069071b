"""What int8 weights and bf16 KV cost in quality, against float32 on the same kernels.

Each golden prompt with its stored greedy continuation runs through every variant in one pass, so
that all variants choose each token under the same context. JSON lines, then a table.

    python -m bench.int8_quality [--model smollm2-135m-instruct] [--prompts 64]

logit_error: root mean square of the logits' differences over that of the float32 logits, each
row's mean removed from both; agreement: share of tokens chosen greedily alike; whole: share of
outputs alike from end to end; alike_tokens: the median length until an output first differs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from tests.golden.references import Reference, load_references
from twinplane import models
from worker_service.domain import DataType
from worker_service.runner.build import LoadedModel, load
from worker_service.runner.input_batch import InputBatch
from worker_service.runner.options import Quantization, RunnerOptions

BLOCK = 16
MAX_TOKENS = 2048
VARIANTS: dict[str, Callable[[RunnerOptions], RunnerOptions]] = {
    "int8": lambda plain: replace(plain, quantization=Quantization.INT8),
    "bf16 KV": lambda plain: replace(plain, kv_data_type=DataType.BFLOAT16),
    "int8, bf16 KV": lambda plain: replace(
        plain, quantization=Quantization.INT8, kv_data_type=DataType.BFLOAT16
    ),
}


@dataclass(frozen=True, slots=True)
class Quality:
    """One variant against float32."""

    variant: str
    prompts: int
    tokens: int
    logit_error: float
    largest_error: float
    agreement: float
    whole: float
    alike_tokens: float
    weights_megabytes: float


@dataclass(slots=True, eq=False)
class Differences:
    """Sums over the outputs so far."""

    squares: float = 0.0
    reference_squares: float = 0.0
    largest: float = 0.0
    alike: int = 0
    tokens: int = 0
    runs: list[float] | None = None

    def add(self, expected: torch.Tensor, got: torch.Tensor) -> None:
        """Logits [n, vocabulary] of one output."""
        error = got - expected
        self.largest = max(self.largest, float(error.abs().max()))
        for name, values in (("squares", error), ("reference_squares", expected)):
            centred = (values - values.mean(dim=-1, keepdim=True)).double()
            setattr(self, name, getattr(self, name) + float(centred.square().sum()))
        same = (expected.argmax(dim=-1) == got.argmax(dim=-1)).numpy()
        self.alike += int(same.sum())
        self.tokens += same.size
        self.runs = [*(self.runs or []), float(same.size if same.all() else same.argmin())]


def float32_options(folder: Path) -> RunnerOptions:
    return RunnerOptions(
        model_folder=folder,
        model_name="quality",
        device="cpu",
        data_type=DataType.FLOAT32,
        block_size=BLOCK,
        kv_cache_bytes=256 << 20,
        max_sequence_count=128,
        max_step_token_count=MAX_TOKENS,
        max_sequence_token_count=MAX_TOKENS,
        attention_backend="compiled",
        thread_count=os.cpu_count(),
        random_seed=0,
        progress=lambda line: None,
    )


def chosen_logits(model: LoadedModel, reference: Reference) -> torch.Tensor:
    """float32 [tokens, vocabulary]: the logits that each token of the continuation comes from."""
    tokens = (*reference.prompt, *reference.tokens[:-1])
    positions = np.arange(len(tokens), dtype=np.int32)
    first = len(reference.prompt) - 1
    wanted = positions[first:]
    blocks = np.arange(1, -(-len(tokens) // BLOCK) + 1, dtype=np.int32)
    zero = np.zeros(wanted.size, dtype=np.int32)
    batch = InputBatch(
        rows=zero[:1],
        query_lengths=np.array([len(tokens)], dtype=np.int32),
        query_starts=np.array([0, len(tokens)], dtype=np.int32),
        context_lengths=np.array([len(tokens)], dtype=np.int32),
        token_ids=np.array(tokens, dtype=np.int32),
        positions=positions,
        slots=positions + np.int32(BLOCK),
        block_tables=blocks[None],
        logit_indices=wanted,
        sampled_rows=zero,
        sampled_positions=zero,
    )
    with torch.inference_mode():
        return model.forward_pass.run(batch).clone()


def compare(
    name: str, base: LoadedModel, variant: LoadedModel, references: Iterable[Reference]
) -> Quality:
    sums = Differences()
    for reference in references:
        sums.add(chosen_logits(base, reference), chosen_logits(variant, reference))
    runs = sums.runs or []
    whole = sum(run == len(r.tokens) for run, r in zip(runs, references, strict=True))
    return Quality(
        variant=name,
        prompts=len(runs),
        tokens=sums.tokens,
        logit_error=(sums.squares / sums.reference_squares) ** 0.5,
        largest_error=sums.largest,
        agreement=sums.alike / sums.tokens,
        whole=whole / len(runs),
        alike_tokens=statistics.median(runs),
        weights_megabytes=variant.forward_pass.weights_bytes / 1e6,
    )


def run(folder: Path, count: int, show: Callable[[Quality], None]) -> list[Quality]:
    references = load_references()[:count]
    plain = float32_options(folder)
    base = load(plain)
    results = []
    for name, change in VARIANTS.items():
        results.append(compare(name, base, load(change(plain)), references))
        show(results[-1])
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--prompts", type=int, default=64)
    arguments = parser.parse_args()
    results = run(
        models.resolve(arguments.model),
        arguments.prompts,
        lambda each: print(
            json.dumps({"benchmark": "int8_quality", "model": arguments.model, **asdict(each)}),
            flush=True,
        ),
    )
    print(f"\n{'variant':<16} {'logit error':>11} {'largest':>8} {'agreement':>10} {'whole':>7}")
    for each in results:
        print(
            f"{each.variant:<16} {each.logit_error:>11.3%} {each.largest_error:>8.3f} "
            f"{each.agreement:>10.2%} {each.whole:>7.1%}"
        )


if __name__ == "__main__":
    main()
