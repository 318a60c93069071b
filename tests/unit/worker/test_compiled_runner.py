"""The promises of the compiled path through the runner: bits, formats, memory, digests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tests.support import runner_rig, tiny_llama
from tests.support.quick import spread
from tests.support.runner_rig import RunnerRig, generate
from tests.support.tiny_llama import VOCABULARY
from worker_service.domain.capability import DataType, Feature
from worker_service.domain.plan import OutputKind
from worker_service.domain.sampling import SamplingParameters
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.options import Quantization

RNG = np.random.default_rng(23)
PROMPTS = [RNG.integers(0, VOCABULARY, length).tolist() for length in (40, 1, 13, 90, 16, 3, 130)]
SAMPLED = [
    SamplingParameters(1.0, 0, 1.0, 0.0, 2**64 - 1),
    SamplingParameters(0.0, 0, 1.0, 0.0, 1),
    SamplingParameters(0.8, 20, 1.0, 0.0, 2),
    SamplingParameters(1.2, 0, 0.9, 0.0, 3),
    SamplingParameters(0.9, 50, 0.8, 0.05, 4),
    SamplingParameters(1.5, 0, 1.0, 0.1, 5),
    SamplingParameters(0.7, 0, 0.95, 0.0, 6),
]
COUNT = 8
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {},
    "int8": {"quantization": Quantization.INT8},
    "bf16-kv": {"kv_data_type": DataType.BFLOAT16},
    "int8-bf16-kv": {"quantization": Quantization.INT8, "kv_data_type": DataType.BFLOAT16},
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": tiny_llama.llama,
    "tied": lambda: tiny_llama.llama(tie_word_embeddings=True),
    "biased": lambda: tiny_llama.llama(attention_bias=True, mlp_bias=True),
    "mistral": lambda: tiny_llama.mistral(sliding_window=13),
    "qwen2": tiny_llama.qwen2,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        name: tiny_llama.save(make(), tmp_path_factory.mktemp(name))
        for name, make in MODELS.items()
    }


def build(folder: Path, **changes: Any) -> ModelRunner:
    return runner_rig.build(folder, executor="compiled", **changes)


def next_logits(runner: ModelRunner, rows: dict[int, list[int]], chunk: int) -> torch.Tensor:
    """float32 [rows, vocabulary]: each row's next logits, its prompt computed in chunks beside the
    others', all last tokens in one step."""
    rig = RunnerRig(runner)
    for row, prompt in rows.items():
        rig.add(row, prompt)
    while counts := {
        row: min(chunk, rig.remaining(row) - 1) for row in rows if rig.remaining(row) > 1
    }:
        rig.step(counts)
    seen: list[torch.Tensor] = []
    runner.observe(lambda step_id, interest, logits: seen.append(logits.clone()))
    rig.step(dict.fromkeys(rows, 1))
    runner.observe(None)
    (logits,) = seen
    return logits


@pytest.mark.parametrize("name", spread(MODELS, 1))
@pytest.mark.parametrize("numbers", FORMATS)
def test_company_order_chunks_and_threads_change_no_bit(
    name: str, numbers: str, folders: dict[str, Path]
) -> None:
    runners = [
        build(folders[name], thread_count=threads, **FORMATS[numbers]) for threads in (2, 1, 3)
    ]
    alone = torch.cat([next_logits(runners[0], {0: prompt}, 1 << 20) for prompt in PROMPTS])
    assert torch.isfinite(alone).all()
    order = [4, 0, 6, 2, 5, 1, 3]
    for runner in runners:
        assert Feature.BATCH_INVARIANT in runner.capability().features
        for chunk in (30, 7):
            together = next_logits(runner, dict(enumerate(PROMPTS)), chunk)
            assert torch.equal(together, alone)
        permuted = next_logits(runner, {row: PROMPTS[which] for row, which in enumerate(order)}, 11)
        assert torch.equal(permuted, alone[order])
    assert torch.equal(next_logits(runners[0], {3: PROMPTS[0]}, 1), alone[:1])


@pytest.mark.parametrize("numbers", FORMATS)
def test_holding_and_sampling_equals_inline(numbers: str, folders: dict[str, Path]) -> None:
    runner = build(folders["tied"], **FORMATS[numbers])
    expected = generate(runner, PROMPTS, COUNT, SAMPLED, chunk=30)
    assert expected == [
        generate(runner, [prompt], COUNT, [own], chunk=17)[0]
        for prompt, own in zip(PROMPTS, SAMPLED, strict=True)
    ]
    rig = RunnerRig(runner)
    for row, prompt in enumerate(PROMPTS):
        rig.add(row, prompt, SAMPLED[row], output=OutputKind.HOLD)
    while any(rig.remaining(row) > 1 for row in rig.rows):
        rig.step(
            {row: min(30, rig.remaining(row) - 1) for row in rig.rows if rig.remaining(row) > 1}
        )
    for _ in range(COUNT):
        held = rig.step(dict.fromkeys(rig.rows, 1)).held_rows
        rig.sample(held.tolist())
    for row, prompt in enumerate(PROMPTS):
        assert rig.rows[row].tokens == prompt + expected[row]


@pytest.mark.parametrize("name", spread(MODELS, 1))
def test_all_executors_choose_the_same_tokens(folders: dict[str, Path], name: str) -> None:
    compiled, torch_, reference = (
        generate(runner_rig.build(folders[name], **choice), PROMPTS, COUNT, chunk=30)
        for choice in (
            {"executor": "compiled"},
            {"attention_backend": "torch"},
            {"attention_backend": "reference"},
        )
    )
    assert compiled == torch_ == reference


@pytest.mark.parametrize("numbers", ["int8", "bf16-kv"])
def test_narrow_formats_stay_near_float32(numbers: str, folders: dict[str, Path]) -> None:
    rows = dict(enumerate(PROMPTS))
    for folder in folders.values():
        exact = next_logits(build(folder), rows, 30)
        narrow = next_logits(build(folder, **FORMATS[numbers]), rows, 30)
        difference = (narrow - exact).square().mean() / exact.square().mean()
        assert 0 < float(difference.sqrt()) < 0.05


def test_formats_have_their_sizes(folders: dict[str, Path]) -> None:
    plain, int8 = build(folders["tied"]), build(folders["tied"], quantization=Quantization.INT8)
    assert int8.memory_pool().weights_bytes < 0.45 * plain.memory_pool().weights_bytes
    half = build(folders["tied"], kv_data_type=DataType.BFLOAT16).memory_pool()
    pool = plain.memory_pool()
    assert (pool.layer_groups[0].data_type, half.layer_groups[0].data_type) == (
        DataType.FLOAT32,
        DataType.BFLOAT16,
    )
    assert half.bytes_per_block * 2 == pool.bytes_per_block
    assert half.block_count == (4 << 20) // half.bytes_per_block
    assert half.kv_bytes == half.block_count * half.bytes_per_block


def test_tied_weights_are_held_once(folders: dict[str, Path]) -> None:
    tied, untied = build(folders["tied"]), build(folders["llama"])
    difference = untied.memory_pool().weights_bytes - tied.memory_pool().weights_bytes
    # The kernels pad the vocabulary to whole panels.
    assert VOCABULARY * 48 * 4 <= difference < (VOCABULARY + 32) * 48 * 4


def test_other_arithmetic_is_another_weight_version(folders: dict[str, Path]) -> None:
    digests = {
        name: build(folders["llama"], **changes).capability().weight_version.digest
        for name, changes in FORMATS.items()
    }
    assert len(set(digests.values())) == len(FORMATS)
    assert all(len(digest) == 64 for digest in digests.values())
    torch_path = runner_rig.build(folders["llama"], executor="torch")
    assert torch_path.capability().weight_version.digest == digests["float32"]
    half = runner_rig.build(folders["llama"], data_type=DataType.BFLOAT16)
    assert half.capability().weight_version.digest not in digests.values()
    named = build(folders["llama"], kv_data_type=DataType.FLOAT32)
    assert named.capability().weight_version.digest == digests["float32"]
    assert build(folders["llama"]).capability().model.data_type is DataType.FLOAT32
