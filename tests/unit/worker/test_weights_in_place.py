"""A commit in place that fails brings the old weights back to the bit; sleep and wake."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.runner_rig import RunnerRig, generate
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
from worker_service.domain.errors import Asleep, MemoryLacking, PlanMismatch, UpdateInvalid
from worker_service.domain.weights import Placement, SleepTag
from worker_service.runner.interface import RestoreFailed
from worker_service.runner.model_runner import ModelRunner

WEIGHTS, KV = frozenset({SleepTag.WEIGHTS}), frozenset({SleepTag.KV})
KINDS = ("compiled", "torch")


def logits(runner: ModelRunner) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    runner.observe(lambda step, interest, logits: seen.append(logits.clone()))
    generate(runner, PROMPTS, 8)
    runner.observe(None)
    return seen


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def failing(runner: ModelRunner, error: Exception, times: int = 1) -> list[weakref.ref[Any]]:
    """The next loads fail when they are done. Returns what they had loaded."""
    store, made = runner._weights, []
    kind = store.recipe.executor

    def load(*given: Any) -> Any:
        executor = kind.load(*given)
        if len(made) < times:
            made.append(weakref.ref(executor))
            raise error
        return executor

    store.recipe = replace(store.recipe, executor=replace(kind, load=load))
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("kept", [False, True], ids=["from files", "kept"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [(MemoryError(), MemoryLacking), (RuntimeError("a bug"), RuntimeError)],
    ids=["memory", "bug"],
)
def test_the_old_weights_are_back(
    tmp_path: Path, kind: str, kept: bool, error: Exception, raised: type[Exception]
) -> None:
    old, new = two_models(tmp_path)
    runner = build(old, weights_root=tmp_path, executor=kind)
    if kept:
        tensors = tensors_in(new)
        swap(runner, streamed(tensors), tensors)
    before, capability, tensors = logits(runner), runner.capability(), runner.tensors()
    other = old if kept else new
    prepared = prepare(runner, from_disk(other, placement=Placement.IN_PLACE))
    assert prepared.facts.device_bytes == 0
    made = failing(runner, error)
    with pytest.raises(raised):
        runner.commit_update(prepared)
    assert same(logits(runner), before)
    assert (runner.capability(), runner.tensors()) == (capability, tensors)
    assert [each() for each in made] == [None], "what was half loaded is kept"
    prepared.drop()
    swap(runner, from_disk(other, placement=Placement.IN_PLACE))
    assert same(logits(runner), logits(build(other, executor=kind)))


def test_a_folder_that_changes_before_the_commit(tmp_path: Path) -> None:
    old, new = two_models(tmp_path)
    runner = build(old, weights_root=tmp_path, executor="torch")
    before = logits(runner)
    prepared = prepare(runner, from_disk(new, placement=Placement.IN_PLACE))
    save_file(tensors_in(old), new / "model.safetensors", {"format": "pt"})
    with pytest.raises(UpdateInvalid, match="files are others than those"):
        runner.commit_update(prepared)
    assert same(logits(runner), before)


def test_nothing_is_left_where_the_old_weights_are_gone_too(tmp_path: Path) -> None:
    old, new = two_models(tmp_path)
    runner = build(old, weights_root=tmp_path, executor="torch")
    prepared = prepare(runner, from_disk(new, placement=Placement.IN_PLACE))
    failing(runner, MemoryError(), times=2)
    with pytest.raises(RestoreFailed, match="can't be loaded again"):
        runner.commit_update(prepared)


# --- sleep ----------------------------------------------------------------------------------------


def resident_bytes() -> int:
    """Memory of this process that is backed, shared or not."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    raise AssertionError


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tags", [WEIGHTS, KV, WEIGHTS | KV], ids=["weights", "kv", "both"])
def test_what_slept_computes_the_same(tmp_path: Path, kind: str, tags: frozenset[SleepTag]) -> None:
    old, _ = two_models(tmp_path)
    runner = build(old, executor=kind)
    before, pool = logits(runner), runner.memory_pool()
    runner.reset()
    executor = weakref.ref(runner._weights.executor)
    assert runner.sleep(tags) == tags
    assert runner.sleep(tags) == tags
    asleep = runner.memory_pool()
    assert (asleep.weights_bytes == 0) == (SleepTag.WEIGHTS in tags) == (executor() is None)
    assert (asleep.kv_bytes == 0) == (SleepTag.KV in tags)
    assert runner.wake(tags) == frozenset()
    assert runner.wake(WEIGHTS | KV) == frozenset()
    awake = runner.memory_pool()
    assert (awake.weights_bytes, awake.kv_bytes) == (pool.weights_bytes, pool.kv_bytes)
    assert same(logits(runner), before)


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="asks Linux")
def test_the_pages_of_a_sleeping_pool_go_back_to_the_system(tmp_path: Path) -> None:
    old, _ = two_models(tmp_path)
    size = 256 << 20
    runner = build(old, executor="compiled", kv_cache_bytes=size)
    with torch.inference_mode():
        for layer in runner._cache.layers:
            layer.keys.fill_(1.0)
            layer.values.fill_(1.0)
    runner.reset()
    full = resident_bytes()
    runner.sleep(KV)
    assert full - resident_bytes() > size // 2
    runner.wake(KV)
    assert float(runner._cache.layers[0].keys[3].sum()) == 0.0


def test_kv_that_rows_need_stays(tmp_path: Path) -> None:
    old, _ = two_models(tmp_path)
    runner = build(old, executor="torch")
    rig = RunnerRig(runner)
    rig.add(0, PROMPTS[0])
    rig.step({0: len(PROMPTS[0])})
    for tags in (KV, WEIGHTS | KV):
        with pytest.raises(PlanMismatch, match="need their KV"):
            runner.sleep(tags)
        assert runner.memory_pool().kv_bytes and runner.memory_pool().weights_bytes
    tokens = rig.step({0: 1}).tokens.tolist()
    runner.sleep(WEIGHTS)
    runner.wake(WEIGHTS)
    assert rig.step({0: 1}).tokens.size == len(tokens) == 1


def test_a_sleeping_runner_takes_no_commit(tmp_path: Path) -> None:
    old, new = two_models(tmp_path)
    runner = build(old, weights_root=tmp_path, executor="torch")
    for placement in (Placement.BESIDE, Placement.IN_PLACE):
        runner.sleep(WEIGHTS)
        prepared = prepare(runner, from_disk(new, placement=placement))
        with pytest.raises(Asleep):
            runner.commit_update(prepared)
        runner.wake(WEIGHTS)
        prepared.drop()
    swap(runner, from_disk(new))
    runner.sleep(WEIGHTS)
    runner.wake(WEIGHTS)
    assert same(logits(runner), logits(build(new, executor="torch")))


def out_of_memory(runner: ModelRunner, old: Path) -> None:
    failing(runner, MemoryError())


def other_files(runner: ModelRunner, old: Path) -> None:
    tensors = {name: each + 1 for name, each in tensors_in(old).items()}
    save_file(tensors, old / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "raised"), [(out_of_memory, MemoryLacking), (other_files, RestoreFailed)]
)
def test_a_wake_that_fails(
    tmp_path: Path, change: Callable[[ModelRunner, Path], None], raised: type[Exception]
) -> None:
    old, _ = two_models(tmp_path)
    runner = build(old, executor="torch")
    runner.sleep(WEIGHTS | KV)
    change(runner, old)
    with pytest.raises(raised):
        runner.wake(WEIGHTS | KV)
    pool = runner.memory_pool()
    assert (pool.weights_bytes, pool.kv_bytes) == (0, 0)
    if raised is MemoryLacking:
        assert runner.wake(WEIGHTS | KV) == frozenset()
