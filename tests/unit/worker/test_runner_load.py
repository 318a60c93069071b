"""What a runner is built from: options, memory and number formats, on a small random model."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import runner_rig, tiny_llama
from tests.support.runner_rig import generate
from tests.support.tiny_llama import MAX_LENGTH, PROMPTS, VOCABULARY
from tests.support.tiny_spec import tiny_spec
from worker_service.domain.capability import DataType, DeviceKind, Feature
from worker_service.load_errors import (
    ExecutorUnavailable,
    KVPoolTooLarge,
    LoadError,
    MemoryBudgetTooSmall,
)
from worker_service.runner.kv_cache import KVCache, layer_groups
from worker_service.runner.model_runner import ModelRunner
from worker_service.weights.checkpoint import Checkpoint

COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tiny_llama.llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    return runner_rig.build(folder)


def test_capability_and_pool_are_true(folder: Path, runner: ModelRunner) -> None:
    capability, pool = runner.capability(), runner.memory_pool()
    assert capability.device.kind is DeviceKind.CPU
    assert capability.device.name
    assert capability.model.architecture == "LlamaForCausalLM"
    assert capability.model.vocabulary_size == VOCABULARY
    assert capability.model.data_type is DataType.FLOAT32
    assert capability.weight_version.generation == 1
    assert len(capability.weight_version.digest) == 64
    assert capability.limits.max_sequence_token_count == MAX_LENGTH
    assert Feature.HELD_SAMPLING in capability.features
    # 3 layers · keys and values · 2 heads · 8 numbers · 4 bytes · 4 tokens
    assert pool.bytes_per_block == 3 * 2 * 2 * 8 * 4 * 4
    assert pool.block_count == (4 << 20) // pool.bytes_per_block
    assert pool.kv_bytes == pool.block_count * pool.bytes_per_block
    assert pool.layer_groups[0].layer_indices == (0, 1, 2)
    stored = sum(tensor.nbytes for tensor in load_file(folder / "model.safetensors").values())
    table = 2 * MAX_LENGTH * 4 * 4
    # The kernels pad outputs to whole panels.
    assert stored + table <= pool.weights_bytes < 1.1 * (stored + table)
    assert pool.workspace_bytes > 0
    assert pool.free_bytes > 0


def test_half_precision_stays_near_single(folder: Path, runner: ModelRunner) -> None:
    half = runner_rig.build(folder, data_type=DataType.BFLOAT16)
    assert half.capability().model.data_type is DataType.BFLOAT16
    assert half.memory_pool().bytes_per_block * 2 == runner.memory_pool().bytes_per_block
    first = [tokens[0] for tokens in generate(half, PROMPTS, 1)]
    exact = [tokens[0] for tokens in generate(runner, PROMPTS, 1)]
    assert sum(a == b for a, b in zip(first, exact, strict=True)) >= len(PROMPTS) - 1


def test_a_small_pool_shortens_sequences_and_says_so(folder: Path) -> None:
    lines: list[str] = []
    runner = runner_rig.build(folder, kv_cache_bytes=11 * 1536, progress=lines.append)
    assert runner.memory_pool().block_count == 11
    assert runner.capability().limits.max_sequence_token_count == 40
    assert any("limited to 40 tokens" in line for line in lines)


class NoHugePages(mmap.mmap):
    """Memory as a kernel built without huge pages gives it."""

    def madvise(self, *args: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")


def test_a_kernel_without_huge_pages_serves_from_small_ones(
    folder: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mmap, "mmap", NoHugePages)
    plain = runner_rig.build(folder)
    assert generate(plain, PROMPTS[:2], COUNT) == generate(runner, PROMPTS[:2], COUNT)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"kv_cache_bytes": 3000}, MemoryBudgetTooSmall, "at least 3072, two blocks of 1536"),
        (
            {"kv_cache_bytes": 11 * 1536, "max_sequence_token_count": 41},
            MemoryBudgetTooSmall,
            "holds 40 tokens",
        ),
        ({"kv_cache_bytes": 1 << 60}, KVPoolTooLarge, "give less by --kv-cache-memory-bytes"),
        ({"max_sequence_token_count": MAX_LENGTH + 1}, LoadError, f"takes {MAX_LENGTH}"),
        (
            {"attention_backend": "quantum"},
            ExecutorUnavailable,
            "there are: torch, reference",
        ),
        ({"device": "cuda:7"}, LoadError, "there is no device 'cuda:7' here"),
        ({"device": "abacus"}, LoadError, "use cpu or cuda"),
        ({"device": "meta"}, LoadError, "use cpu or cuda"),
    ],
)
def test_options_that_cannot_be_met_say_why(
    folder: Path, changes: dict[str, Any], error: type[LoadError], words: str
) -> None:
    with pytest.raises(error, match=words):
        runner_rig.build(folder, **changes)


def test_no_weight_is_read_for_a_pool_that_can_not_be(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "describe", lambda *given: pytest.fail("weights are read"))
    with pytest.raises(KVPoolTooLarge):
        runner_rig.build(folder, kv_cache_bytes=1 << 60)


def test_a_gpu_without_room_for_the_pool_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate …")

    monkeypatch.setattr(torch, "empty", no_room)
    groups = layer_groups(tiny_spec(), DataType.FLOAT32)
    with pytest.raises(KVPoolTooLarge, match="give less by --kv-cache-memory-bytes"):
        KVCache(groups, 10, 4, torch.device("meta"))


def test_the_map_is_closed_after_loading(folder: Path, runner: ModelRunner) -> None:
    """Weights are copies: the folder may be replaced while the worker runs."""
    del runner
    maps = Path("/proc/self/maps")
    if maps.is_file():
        assert str(folder / "model.safetensors") not in maps.read_text()
