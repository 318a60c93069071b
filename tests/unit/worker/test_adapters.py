"""Adapters in a runner: merged = applied, mixed = alone, chunked = whole, zeros = the base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import runner_rig, tiny_llama
from tests.support.quick import spread
from tests.support.tiny_adapters import PLAIN, load, read, save_adapter, tensors_of
from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.errors import AdapterInUse
from worker_service.runner.logit_batch import LogitBatch
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.options import Quantization

LIMITS = AdapterLimits(4, 16)
PROMPTS = tiny_llama.PROMPTS
MAKERS: dict[str, Any] = {
    "llama": tiny_llama.llama,
    "qwen2": tiny_llama.qwen2,
    "mistral": tiny_llama.mistral,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tiny_llama.llama(), tmp_path_factory.mktemp("llama"))


def build(folder: Path, **changes: Any) -> ModelRunner:
    return runner_rig.build(folder, **{"adapter_limits": LIMITS, **changes})


@pytest.fixture(scope="module")
def runner(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    """With three adapters of different ranks and formats, the fourth slot empty."""
    runner = build(folder)
    for slot, rank in ((1, 4), (2, 16), (3, 7)):
        kept = torch.bfloat16 if slot == 2 else torch.float32
        modules = runner.adapters.modules
        assert modules is not None
        tensors = {
            name: each.to(kept) for name, each in tensors_of(modules, rank, seed=slot).items()
        }
        path = tmp_path_factory.mktemp(f"adapter{slot}")
        load(runner.adapters, slot, save_adapter(path, tensors, {**PLAIN, "r": rank}))
    yield runner


def logits_of(
    runner: ModelRunner, prompts: list[list[int]], slots: list[int], chunk: int = 1 << 20
) -> list[torch.Tensor]:
    """The logits behind each prompt and the four tokens after it, by prompt."""
    seen: dict[int, list[torch.Tensor]] = {row: [] for row in range(len(prompts))}

    def observe(step_id: int, interest: LogitBatch, logits: torch.Tensor) -> None:
        for row, each in zip(interest.rows.tolist(), logits, strict=True):
            seen[row].append(each.clone())

    runner.observe(observe)
    try:
        runner_rig.generate(runner, prompts, 5, chunk=chunk, slots=slots)
    finally:
        runner.observe(None)
    return [torch.stack(each) for each in seen.values()]


def merged(
    base: torch.nn.Module, tensors: dict[str, torch.Tensor], scale: float, folder: Path
) -> Path:
    """The model with the adapter's product added to its weights."""
    model: Any = base
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            module = name.removesuffix(".weight")
            a = tensors.get(f"base_model.model.{module}.lora_A.weight")
            if a is not None:
                b = tensors[f"base_model.model.{module}.lora_B.weight"]
                parameter += scale * (b.double() @ a.double()).float()
    return tiny_llama.save(model, folder)


@pytest.mark.parametrize(("family", "executor"), [
    *((family, "compiled") for family in MAKERS), ("llama", "torch"), ("qwen2", "torch"),
])  # fmt: skip
def test_an_adapter_gives_what_merged_weights_give(
    family: str, executor: str, tmp_path: Path
) -> None:
    adapted = build(tiny_llama.save(MAKERS[family](), tmp_path / "base"), executor=executor)
    modules = adapted.adapters.modules
    assert modules is not None
    tensors = tensors_of(modules, 4, size=0.1)
    load(adapted.adapters, 2, save_adapter(tmp_path / "adapter", tensors))
    folder = merged(MAKERS[family](), tensors, 2.0, tmp_path / "merged")
    expected = logits_of(build(folder, executor=executor), PROMPTS, [0] * len(PROMPTS))
    applied = logits_of(adapted, PROMPTS, [2] * len(PROMPTS))
    plain = logits_of(adapted, PROMPTS, [0] * len(PROMPTS))
    for one, other, base in zip(applied, expected, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(one, base, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_mixed_batch_gives_each_row_the_bits_that_it_gets_alone(
    runner: ModelRunner, chunk: int
) -> None:
    slots = [1, 2, 0, 3, 2, 1]
    together = logits_of(runner, PROMPTS, slots, chunk)
    for prompt, slot, mixed in zip(PROMPTS, slots, together, strict=True):
        (alone,) = logits_of(runner, [prompt], [slot])
        assert torch.equal(mixed, alone)


def test_rows_without_an_adapter_keep_the_bits_of_a_worker_without_slots(
    runner: ModelRunner, folder: Path
) -> None:
    without = logits_of(runner_rig.build(folder), PROMPTS, [0] * 6)
    beside = logits_of(runner, PROMPTS, [0, 1, 0, 2, 0, 3])
    for index in (0, 2, 4):
        assert torch.equal(without[index], beside[index])


@pytest.mark.parametrize("executor", ["compiled", "torch"])
@pytest.mark.parametrize("quantization", [Quantization.NONE, Quantization.INT8])
def test_an_adapter_of_zeros_is_the_base_model_to_the_bit(
    folder: Path, tmp_path: Path, executor: str, quantization: Quantization
) -> None:
    if executor == "torch" and quantization is not Quantization.NONE:
        pytest.skip("torch runs no int8 weights")
    runner = build(folder, executor=executor, quantization=quantization)
    assert runner.adapters.modules is not None
    tensors = tensors_of(runner.adapters.modules)
    zeros = {name: each * (".lora_A." in name) for name, each in tensors.items()}
    load(runner.adapters, 1, save_adapter(tmp_path / "zero", zeros))
    adapted = logits_of(runner, PROMPTS, [1] * 6)
    base = logits_of(runner, PROMPTS, [0] * 6)
    assert all(torch.equal(one, other) for one, other in zip(adapted, base, strict=True))


@pytest.mark.parametrize("seed", spread(range(60), 12))
def test_any_choice_of_modules_ranks_and_scales_is_applied_as_it_is_merged(
    seed: int, folder: Path, tmp_path: Path, runner: ModelRunner
) -> None:
    """Random configs: targets by name, layers, patterns of ranks and alphas, rslora, formats."""
    random = torch.Generator().manual_seed(seed)

    def pick(count: int) -> int:
        return int(torch.randint(count, (), generator=random))

    modules = runner.adapters.modules
    assert modules is not None
    names = sorted({module.rpartition(".")[2] for module in modules})
    chosen = [name for name in names if pick(2)] or ["q_proj"]
    rank, odd_rank, alpha = 1 + pick(16), 1 + pick(16), 1 + pick(32)
    config: dict[str, Any] = {
        **PLAIN,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": chosen,
        "use_rslora": bool(pick(2)),
    }
    layers = [layer for layer in range(3) if pick(2)]
    if layers:
        config["layers_to_transform"] = layers
        config["layers_pattern"] = [None, "layers", ["layers", "h"]][pick(3)]
    odd_name = [module for module in modules if module.endswith(f".{chosen[0]}")][-1]
    if pick(2):
        config["rank_pattern"] = {odd_name: odd_rank}
        config["alpha_pattern"] = {chosen[0]: 2 * alpha}
    else:
        odd_rank = rank
    kept = [torch.float32, torch.bfloat16, torch.float16][pick(3)]
    tensors: dict[str, torch.Tensor] = {}
    scaled: dict[str, torch.Tensor] = {}
    for module, shape in modules.items():
        last = module.rpartition(".")[2]
        layer = int(module.split(".")[2])
        if last not in chosen or (layers and layer not in layers):
            continue
        own = odd_rank if module == odd_name else rank
        own_alpha = 2 * alpha if "alpha_pattern" in config and last == chosen[0] else alpha
        made = tensors_of({module: shape}, own, seed * 1000 + len(tensors), 0.1)
        made = {name: each.to(kept) for name, each in made.items()}
        tensors |= made
        scale = own_alpha / (own**0.5 if config["use_rslora"] else own)
        scaled |= {
            name: each.float() * (scale if ".lora_B." in name else 1.0)
            for name, each in made.items()
        }
    path = save_adapter(tmp_path / "adapter", tensors, config)
    runner.reset()
    described = load(runner.adapters, 4, path).adapter
    assert described.rank == rank and set(described.target_modules) == set(chosen)
    expected = logits_of(
        runner_rig.build(merged(tiny_llama.llama(), scaled, 1.0, tmp_path / "merged")),
        PROMPTS[:2],
        [0, 0],
    )
    applied = logits_of(runner, PROMPTS[:2], [4, 4])
    for one, other in zip(applied, expected, strict=True):
        first = one[0] - other[0]
        assert first.abs().max() <= 2e-3 * other.abs().max()


def test_what_a_digest_depends_on(runner: ModelRunner, tmp_path: Path) -> None:
    modules = runner.adapters.modules
    assert modules is not None
    tensors = tensors_of(modules)

    def digest(tensors: dict[str, torch.Tensor], **config: Any) -> str:
        folder = save_adapter(tmp_path / "a", tensors, {**PLAIN, **config})
        return read(runner.adapters, folder).description.digest

    base = digest(tensors)
    assert digest(dict(reversed(tensors.items()))) == base
    assert digest(tensors, lora_dropout=0.1, base_model_name_or_path="other") == base
    assert digest(tensors, target_modules=sorted({m.rpartition(".")[2] for m in modules})) == base
    name = next(iter(tensors))
    different = {
        digest(tensors, lora_alpha=9),
        digest(tensors, use_rslora=True),
        digest({**tensors, name: tensors[name] + 1}),
        digest({each: value.bfloat16() for each, value in tensors.items()}),
    }
    assert len(different | {base}) == 5


def test_a_slot_in_use_is_left_alone(runner: ModelRunner, folder: Path) -> None:
    rig = runner_rig.RunnerRig(runner)
    rig.add(0, PROMPTS[0], adapter_slot=1)
    rig.step({0: len(PROMPTS[0])})
    held = runner.adapters.held()
    with pytest.raises(AdapterInUse, match="a row uses slot 1"):
        runner.adapters.clear(1)
    assert runner.adapters.held() == held
    rig.remove(0)
    rig.step({})
    runner.adapters.require_unused(1)


def test_slots_take_what_was_planned_and_none_cost_nothing(folder: Path) -> None:
    without = runner_rig.build(folder)
    assert without.memory_pool().adapters_bytes == 0
    assert without.capability().adapter_slot_count == 0
    runner = build(folder)
    capability = runner.capability()
    assert (capability.adapter_slot_count, capability.max_adapter_rank) == (4, 16)
    assert runner.memory_pool().adapters_bytes > 0
