"""Adapters stay in their slots when the weights are exchanged, and change the new ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.runner_rig import build, generate
from tests.support.tiny_adapters import load, save_adapter, tensors_of
from tests.support.tiny_llama import PROMPTS
from tests.support.weight_updates import from_disk, swap, two_models
from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.weights import Placement
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.options import Quantization

LIMITS = AdapterLimits(3, 8)
SLOTS = [2, 0, 3, 2, 0, 3]


def fill(runner: ModelRunner, folder: Path) -> None:
    assert runner.adapters.modules is not None
    for slot in (2, 3):
        path = save_adapter(folder / str(slot), tensors_of(runner.adapters.modules, seed=slot))
        load(runner.adapters, slot, path)


@pytest.mark.parametrize(
    ("executor", "quantization"),
    [
        ("compiled", Quantization.NONE),
        ("compiled", Quantization.INT8),
        ("torch", Quantization.NONE),
    ],
)
@pytest.mark.parametrize("placement", [Placement.BESIDE, Placement.IN_PLACE])
def test_new_weights_with_the_same_adapters(
    executor: str, quantization: Quantization, placement: Placement, tmp_path: Path
) -> None:
    old, new = two_models(tmp_path)
    settings = {"executor": executor, "quantization": quantization, "adapter_limits": LIMITS}
    runner = build(old, weights_root=tmp_path, **settings)
    fill(runner, tmp_path / "adapters")
    held, pool = runner.adapters.held(), runner.memory_pool()
    before = generate(runner, PROMPTS, 8, slots=SLOTS)
    swap(runner, from_disk("new", placement=placement), {})
    assert runner.adapters.held() == held
    assert runner.memory_pool().adapters_bytes == pool.adapters_bytes
    fresh = build(new, **settings)
    fill(fresh, tmp_path / "again")
    expected = generate(fresh, PROMPTS, 8, slots=SLOTS)
    assert generate(runner, PROMPTS, 8, slots=SLOTS) == expected != before
