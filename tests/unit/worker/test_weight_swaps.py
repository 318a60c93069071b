"""After a commit a runner computes what a fresh one does with the same weights, to the bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runner_rig import generate
from tests.support.tiny_llama import PROMPTS
from tests.support.weight_updates import (
    build,
    from_disk,
    prepare,
    streamed,
    swap,
    tensors_in,
    two_models,
)
from worker_service.domain.weights import Placement
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.options import Quantization

COUNT = 12
WAYS: dict[str, dict[str, Any]] = {
    "compiled": {"executor": "compiled"},
    "int8": {"executor": "compiled", "quantization": Quantization.INT8},
    "torch": {"executor": "torch"},
}
PLACEMENTS = (Placement.BESIDE, Placement.IN_PLACE)


def outputs(runner: ModelRunner) -> list[list[int]]:
    return generate(runner, PROMPTS, COUNT)


def logits_of(runner: ModelRunner) -> list[torch.Tensor]:
    """Every step's logits, bit by bit."""
    seen: list[torch.Tensor] = []
    runner.observe(lambda step, interest, logits: seen.append(logits.clone()))
    generate(runner, PROMPTS, COUNT)
    runner.observe(None)
    return seen


def assert_same(runner: ModelRunner, fresh: ModelRunner) -> None:
    assert runner.capability().weight_version.digest == fresh.capability().weight_version.digest
    for one, other in zip(logits_of(runner), logits_of(fresh), strict=True):
        assert torch.equal(one, other)
    assert runner.tensors() == fresh.tensors()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda each: each.value)
def test_from_disk(tmp_path: Path, way: str, tied: bool, placement: Placement) -> None:
    old, new = two_models(tmp_path, tie_word_embeddings=tied)
    runner = build(old, weights_root=tmp_path, **WAYS[way])
    before, first = outputs(runner), runner.capability().weight_version
    prepared = prepare(runner, from_disk("new", placement=placement))
    assert outputs(runner) == before, "prepared weights change nothing"
    version = runner.commit_update(prepared)
    assert version == replace(first, generation=2, digest=prepared.facts.digest)
    prepared.drop()
    fresh = build(new, **WAYS[way])
    assert outputs(runner) == outputs(fresh) != before
    assert_same(runner, fresh)
    assert runner.memory_pool().prepared_bytes == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("placement", PLACEMENTS, ids=lambda each: each.value)
def test_from_a_stream(tmp_path: Path, way: str, placement: Placement) -> None:
    old, new = two_models(tmp_path)
    runner = build(old, **WAYS[way])
    tensors = tensors_in(new)
    swap(runner, streamed(tensors, placement=placement), tensors)
    assert_same(runner, build(new, **WAYS[way]))
    assert runner.memory_pool().kept_tensors_bytes == sum(each.nbytes for each in tensors.values())
    tensors = tensors_in(old)
    swap(runner, streamed(tensors, placement=placement), tensors)
    assert_same(runner, build(old, **WAYS[way]))
    assert runner.capability().weight_version.generation == 3
    assert runner.memory_pool().kept_tensors_bytes == sum(each.nbytes for each in tensors.values())


@pytest.mark.parametrize("way", WAYS)
def test_partial_updates_add_up_to_the_whole(tmp_path: Path, way: str) -> None:
    old, new = two_models(tmp_path)
    runner = build(old, **WAYS[way])
    tensors = tensors_in(new)
    names = sorted(tensors)
    for index, placement in enumerate((Placement.BESIDE, Placement.IN_PLACE, Placement.AUTO)):
        some = {name: tensors[name] for name in names[index::3]}
        swap(runner, streamed(some, is_partial=True, placement=placement), some)
    assert_same(runner, build(new, **WAYS[way]))
