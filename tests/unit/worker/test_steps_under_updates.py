"""What runs while other weights are prepared, refused, aborted or committed computes what it would
without: the worker behind its facade, with a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.runner_rig import RunnerRig, generate
from tests.support.tiny_llama import PROMPTS
from tests.support.weight_updates import build, chunks, from_disk, streamed, tensors_in, two_models
from worker_service.domain.errors import (
    RunnerFailed,
    UpdateInvalid,
    WeightVersionMismatch,
    WorkerError,
)
from worker_service.domain.weights import Placement, TensorChunk, WeightsUpdate
from worker_service.facade import WorkerFacade
from worker_service.lifecycle import LifecycleState
from worker_service.runner.model_runner import ModelRunner

COUNT = 40


class Streams:
    """Rows that generate greedily through the facade, under one epoch."""

    def __init__(self, runner: ModelRunner, facade: WorkerFacade) -> None:
        self.rig = RunnerRig(runner)
        self.facade = facade
        self.outputs: dict[int, list[int]] = {}
        for row, prompt in enumerate(PROMPTS):
            self.rig.add(row, prompt)
            self.outputs[row] = []

    async def step(self) -> None:
        counts = {row: self.rig.remaining(row) for row in self.outputs}
        await self.run(counts)

    async def run(self, counts: Mapping[int, int]) -> None:
        result = await (await self.facade.submit(self.rig.plan(counts)))
        for row, count in counts.items():
            self.rig.rows[row].computed += count
        self.rig.take(result)
        for row, token in zip(result.rows.tolist(), result.tokens.tolist(), strict=True):
            self.outputs[row].append(token)


async def chunks_of(tensors: Mapping[str, torch.Tensor]) -> AsyncIterator[TensorChunk]:
    for chunk in chunks(tensors, 4096):
        yield chunk


async def never_ends(tensors: Mapping[str, torch.Tensor]) -> AsyncIterator[TensorChunk]:
    yield next(chunks(tensors, 4096))
    await asyncio.Event().wait()


@pytest.mark.parametrize("kind", ["compiled", "torch"])
async def test_neighbours_are_not_disturbed(tmp_path: Path, kind: str) -> None:
    old, new = two_models(tmp_path)
    expected = generate(build(old, executor=kind), PROMPTS, COUNT)
    runner = build(old, executor=kind, weights_root=tmp_path)
    facade = WorkerFacade(lambda: runner, worker_id="w", incarnation_id="i")
    await facade.load()
    streams = Streams(runner, facade)
    await facade.attach(1, "test", 1, 1)
    idle = await facade.memory_pool()
    tensors = tensors_in(new)
    broken = tensors | {"model.norm.weight": torch.full((48,), float("nan"))}
    updates = [
        (streamed(tensors, placement=placement), chunks_of(tensors)) for placement in Placement
    ]
    updates += [(from_disk("new"), chunks_of({})), (streamed(broken), chunks_of(broken))]
    updates += [(streamed(tensors), never_ends(tensors))]
    for update, given in updates:
        preparing = asyncio.create_task(attempt(facade, update, given))
        for _ in range(4):
            await streams.step()
        await facade.updates.abort(1, "u")
        await preparing
        await facade.updates.abort(1, "u")
        assert facade.updates.prepared is None
    while len(streams.outputs[0]) < COUNT:
        await streams.step()
    assert [streams.outputs[row][:COUNT] for row in range(len(PROMPTS))] == expected
    streams.rig.removed += list(streams.rig.rows)
    await streams.run({})
    pool = await facade.memory_pool()
    assert pool.used_block_count == idle.used_block_count == 0
    assert (pool.prepared_bytes, pool.kept_tensors_bytes) == (0, 0)
    assert pool.weights_bytes == idle.weights_bytes
    await facade.close()


async def attempt(
    facade: WorkerFacade, update: WeightsUpdate, given: AsyncIterator[TensorChunk]
) -> None:
    try:
        await facade.updates.prepare(1, update, given)
    except WorkerError as error:
        refused = isinstance(error, UpdateInvalid)
        assert refused == ("NaN" in str(error)) or "aborted" in str(error)


@pytest.mark.parametrize("placement", [Placement.BESIDE, Placement.IN_PLACE], ids=str)
@pytest.mark.parametrize("kind", ["compiled", "torch"])
async def test_a_commit_keeps_the_rows_and_changes_the_weights(
    tmp_path: Path, kind: str, placement: Placement
) -> None:
    """A plan for the old version is refused; rows that go on do so with their tokens and KV; rows
    that come are as on a fresh worker."""
    old, new = two_models(tmp_path)
    expected = generate(build(new, executor=kind), PROMPTS, 10)
    runner = build(old, executor=kind, weights_root=tmp_path)
    facade = WorkerFacade(lambda: runner, worker_id="w", incarnation_id="i")
    await facade.load()
    streams = Streams(runner, facade)
    await facade.attach(1, "test", 1, 1)
    for _ in range(3):
        await streams.step()
    prepared = await facade.updates.prepare(1, from_disk("new", placement=placement), chunks_of({}))
    stale = streams.rig.plan({row: streams.rig.remaining(row) for row in streams.outputs})
    committed = await facade.updates.commit(1, "u", prepared.digest)
    assert committed.paused_seconds > 0
    with pytest.raises(WeightVersionMismatch):
        await (await facade.submit(stale))
    result = await (await facade.submit(replace(stale, weight_version=committed.version)))
    assert result.rows.tolist() == list(streams.outputs)
    await facade.attach(2, "test", 1, 1)
    await facade.close()
    assert generate(runner, PROMPTS, 10) == expected


async def test_a_worker_without_any_weights_ends(tmp_path: Path) -> None:
    """A commit in place has failed, and so has the load of the weights before it."""
    old, new = two_models(tmp_path)
    runner = build(old, executor="torch", weights_root=tmp_path)
    facade = WorkerFacade(lambda: runner, worker_id="w", incarnation_id="i")
    await facade.load()
    await facade.attach(1, "test", 1, 1)
    update = from_disk("new", placement=Placement.IN_PLACE)
    prepared = await facade.updates.prepare(1, update, chunks_of({}))
    for folder in (old, new):
        (folder / "model.safetensors").unlink()
    with pytest.raises(RunnerFailed, match=r"its weights are lost: .*has neither"):
        await facade.updates.commit(1, "u", prepared.digest)
    assert facade.lifecycle.state is LifecycleState.BROKEN
    assert "its weights are lost" in facade.broken_by
    await facade.close()


async def test_a_commit_in_place_that_fails_is_told_and_the_worker_serves_on(
    tmp_path: Path,
) -> None:
    old, new = two_models(tmp_path)
    expected = generate(build(old, executor="torch"), PROMPTS, 6)
    runner = build(old, executor="torch", weights_root=tmp_path)
    facade = WorkerFacade(lambda: runner, worker_id="w", incarnation_id="i")
    await facade.load()
    streams = Streams(runner, facade)
    await facade.attach(1, "test", 1, 1)
    for _ in range(3):
        await streams.step()
    update = from_disk("new", placement=Placement.IN_PLACE)
    prepared = await facade.updates.prepare(1, update, chunks_of({}))
    (new / "model.safetensors").unlink()
    for _ in range(2):  # the same again gets the same answer
        with pytest.raises(UpdateInvalid, match="has neither"):
            await facade.updates.commit(1, "u", prepared.digest)
    assert facade.updates.prepared is None
    assert facade.lifecycle.state is LifecycleState.ACTIVE
    for _ in range(3):
        await streams.step()
    assert list(streams.outputs.values()) == expected
    await facade.close()
