"""What int8 weights and bf16 KV cost in quality, against float32 on the same kernels.

Each golden prompt with its stored greedy continuation runs through every variant in one pass, so
that all variants choose each token under the same context. The error of the logits is the root mean
square of their differences over that of the float32 logits, each row's mean removed from both.

    python -m bench.int8_quality [--model smollm2-135m-instruct] [--prompts 64]
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench import options as flags
from bench.results import Results
from tests.golden.references import Reference, load_references
from twinplane import models
from worker_service.domain.batch import StepBatch
from worker_service.domain.capability import DataType
from worker_service.runner.load import LoadedModel, load_model
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
        executor="compiled",
        attention_backend=None,
        thread_count=os.cpu_count() or 1,
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
    batch = StepBatch(
        query_starts=np.array([0, len(tokens)], dtype=np.int32),
        context_lengths=np.array([len(tokens)], dtype=np.int32),
        token_ids=np.array(tokens, dtype=np.int32),
        positions=positions,
        slots=positions + np.int32(BLOCK),
        block_tables=blocks[None],
    )
    with torch.inference_mode():
        return model.executor.run(batch, wanted).clone()


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
        weights_megabytes=variant.executor.weights_bytes / 1e6,
    )


def main() -> None:
    parser = flags.parser(__doc__, rounds=1, peers=False)
    parser.add_argument("--prompts", type=int, default=64)
    options = parser.parse_args()
    results = flags.open_results("int8_quality", options)
    references = load_references()[: options.prompts]
    plain = float32_options(models.resolve(options.model))
    base = load_model(plain)
    for name, change in VARIANTS.items():
        report(results, compare(name, base, load_model(change(plain)), references))
    results.show()


def report(results: Results, quality: Quality) -> None:
    case = f"{quality.prompts} prompts, {quality.tokens} tokens"
    results.measured(
        case, quality.variant, "tokens until an output differs", [quality.alike_tokens],
        largest_logit_error=quality.largest_error, weights_megabytes=quality.weights_megabytes,
    )  # fmt: skip
    for quantity, value in (
        ("error of the logits", quality.logit_error),
        ("tokens chosen greedily alike", quality.agreement),
        ("outputs alike to their end", quality.whole),
    ):
        results.ratio(case, quality.variant, "float32", quantity, value)


if __name__ == "__main__":
    main()
