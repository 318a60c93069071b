"""What exchanges of weights take and give back, and the ways that weights come: gRPC and GGUF."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from gguf import GGMLQuantizationType

from tests.support.runner_rig import generate
from tests.support.tiny_llama import PROMPTS
from tests.support.weight_updates import (
    build,
    descriptions,
    from_disk,
    prepare,
    stream_messages,
    streamed,
    swap,
    tensors_in,
    two_models,
)
from tests.support.worker_rig import refusal, serving
from tests.unit.twinplane.tiny_gguf import TinyGguf
from twinplane import models
from twinplane.worker.v1 import model_runner_pb2, weights_pb2
from worker_service.domain.weights import Placement
from worker_service.runner.model_runner import ModelRunner


def noted(runner: ModelRunner) -> list[weakref.ref[Any]]:
    """Weak references to every executor from now on, the live one first."""
    store = runner._weights
    kind, made = store.recipe.executor, [weakref.ref(store.executor)]

    def load(*given: Any) -> Any:
        executor = kind.load(*given)
        made.append(weakref.ref(executor))
        return executor

    store.recipe = replace(store.recipe, executor=replace(kind, load=load))
    return made


@pytest.mark.parametrize("kind", ["compiled", "torch"])
def test_one_executor_is_left_after_each_exchange(tmp_path: Path, kind: str) -> None:
    old, new = two_models(tmp_path)
    runner = build(old, weights_root=tmp_path, executor=kind)
    made, folders = noted(runner), (new, old)
    idle = runner.memory_pool()
    expected = [generate(build(folder, executor=kind), PROMPTS, 4) for folder in folders]
    for turn in range(12):
        folder = folders[turn % 2]
        placement = (Placement.BESIDE, Placement.IN_PLACE)[turn // 2 % 2]
        if turn % 3:
            tensors = tensors_in(folder)
            swap(runner, streamed(tensors, placement=placement), tensors)
            del tensors
        else:
            swap(runner, from_disk(folder, placement=placement))
        alive = [each() for each in made if each() is not None]
        assert alive == [runner._weights.executor]
        del alive
        assert generate(runner, PROMPTS, 4) == expected[turn % 2]
    pool = runner.memory_pool()
    assert len(made) == 13
    assert (pool.weights_bytes, pool.prepared_bytes) == (idle.weights_bytes, 0)
    swap(runner, from_disk(old))
    assert runner.memory_pool().kept_tensors_bytes == 0


def test_a_commit_beside_loads_nothing(tmp_path: Path) -> None:
    """So its pause does not grow with the model."""
    old, new = two_models(tmp_path)
    runner = build(old, weights_root=tmp_path, executor="torch")
    made = noted(runner)
    prepared = prepare(runner, from_disk(new, placement=Placement.BESIDE))
    assert len(made) == 2
    assert prepared.facts.device_bytes == runner.memory_pool().prepared_bytes
    runner.commit_update(prepared)
    assert len(made) == 2
    assert runner._weights.executor is made[1]() and made[0]() is not None
    prepared.drop()
    assert made[0]() is None


def test_a_partial_update_keeps_only_what_it_replaces(tmp_path: Path) -> None:
    old, new = two_models(tmp_path)
    runner = build(old, executor="torch")
    tensors = tensors_in(new)
    names = sorted(tensors)
    for some in (names[:5], names[3:8], names[:5]):
        part = {name: tensors[name] for name in some}
        swap(runner, streamed(part, is_partial=True), part)
    kept = sum(tensors[name].nbytes for name in names[:8])
    assert runner.memory_pool().kept_tensors_bytes == kept


async def test_a_model_is_exchanged_over_grpc(tmp_path: Path) -> None:
    """A stream in chunks of a few kilobytes; what the worker tells of itself follows."""
    old, new = two_models(tmp_path)
    runner = build(old, executor="compiled")
    fresh = build(new, executor="compiled")
    digest = fresh.capability().weight_version.digest
    tensors = {name: each.bfloat16() for name, each in tensors_in(new).items()}
    async with serving(build=lambda: runner) as rig:
        await rig.attach()
        refused = await refusal(
            rig.stub.PrepareWeights(iter(stream_messages(tensors, 5000, expected_digest=digest)))
        )
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.field == "update.expected_digest", "other numbers, another digest"
        tensors = tensors_in(new)
        call = rig.stub.PrepareWeights(iter(stream_messages(tensors, 5000, expected_digest=digest)))
        prepared = (await call).prepared
        assert prepared.digest == digest
        assert prepared.host_bytes == sum(each.nbytes for each in tensors.values())
        pool = await rig.stub.GetMemoryPool(model_runner_pb2.GetMemoryPoolRequest())
        assert pool.memory_pool.memory.prepared_bytes == prepared.device_bytes > 0
        assert pool.memory_pool.memory.kept_tensors_bytes == prepared.host_bytes
        request = weights_pb2.CommitWeightsRequest(epoch=1, update_id="u", digest=digest)
        committed = await rig.stub.CommitWeights(request)
        assert committed.weight_version.generation == 2
        listed = await rig.stub.ListTensors(weights_pb2.ListTensorsRequest())
        assert list(listed.tensors) == sorted(descriptions(tensors), key=lambda each: each.name)
    assert generate(runner, PROMPTS, 8) == generate(fresh, PROMPTS, 8)


@pytest.mark.parametrize("placement", [Placement.BESIDE, Placement.IN_PLACE], ids=str)
def test_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: Placement) -> None:
    monkeypatch.setenv("TWINPLANE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "root"
    root.mkdir()
    TinyGguf().write(root / "old.gguf")
    TinyGguf(quantization=GGMLQuantizationType.Q8_0).write(root / "new.gguf")
    old = models.resolve(str(root / "old.gguf"))
    runner = build(old, weights_root=root, executor="torch")
    swap(runner, from_disk("new.gguf", placement=placement))
    fresh = build(models.resolve(str(root / "new.gguf")), executor="torch")
    assert runner.tensors() == fresh.tensors()
    assert runner.capability().weight_version.digest == fresh.capability().weight_version.digest
    prompts = [[1, 5, 9], [70]]
    assert generate(runner, prompts, 5) == generate(fresh, prompts, 5)
