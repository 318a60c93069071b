"""What a worker's own metrics say: steps by kind, memory, state; and that asking costs no step."""

from __future__ import annotations

import asyncio
import random
import re
from dataclasses import replace

import numpy as np
import pytest

from tests.support.worker_rig import Device, first, following, forward, refusal, serving, until
from worker_service.domain.capability import MemoryPool
from worker_service.domain.errors import WorkerLoading
from worker_service.domain.plan import (
    SamplePlan,
    ScheduledRows,
    StepPlan,
    StepResult,
    WeightVersion,
)
from worker_service.lifecycle import LifecycleState
from worker_service.telemetry import StepKind, WorkerTelemetry, kind_of

POOL = MemoryPool(
    block_count=11,
    block_token_count=4,
    bytes_per_block=100,
    layer_groups=(),
    used_block_count=3,
    weights_bytes=5000,
    kv_bytes=1100,
    workspace_bytes=70,
    free_bytes=900,
    prepared_bytes=40,
    kept_tensors_bytes=30,
)
MEMORY = {
    "weights": 5000,
    "kv": 1100,
    "workspace": 70,
    "prepared": 40,
    "kept_tensors": 30,
    "free": 900,
}


def plan(counts: list[int], drafts: list[int] | None = None) -> StepPlan:
    scheduled = ScheduledRows(
        rows=np.arange(len(counts), dtype=np.int32),
        token_counts=np.array(counts, dtype=np.int32),
        draft_counts=np.array(drafts or [], dtype=np.int32),
    )
    none = np.empty(0, dtype=np.int32)
    return StepPlan(1, 1, WeightVersion(1, "a"), none, (), scheduled, lambda: b"")


def sampling() -> SamplePlan:
    return SamplePlan(1, 1, np.zeros(1, dtype=np.int32), None)


def telemetry(state: LifecycleState = LifecycleState.ACTIVE) -> WorkerTelemetry:
    return WorkerTelemetry("1", lambda: state, lambda: 7)


def scrape(one: WorkerTelemetry) -> dict[str, float]:
    text = one.render().decode()
    pairs = re.findall(r"^(twinplane_\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
    return {name.replace('"', ""): float(value) for name, value in pairs}


@pytest.mark.parametrize("seed", range(60))
def test_the_kind_of_a_step_is_what_its_rows_compute(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        sure = [rng.choice((1, 1, 1, 2, 9)) for _ in range(rng.randrange(0, 5))]
        drafts = [rng.randrange(4) if rng.random() < 0.5 else 0 for _ in sure]
        made = plan([a + b for a, b in zip(sure, drafts, strict=True)], drafts)
        match kind_of(made):
            case None:
                assert not sure
            case StepKind.DECODE:
                assert set(sure) == {1}
            case StepKind.PROMPT:
                assert 1 not in sure and sure
            case StepKind.MIXED:
                assert 1 in sure and set(sure) != {1}
            case StepKind.SAMPLE:
                raise AssertionError("no row was held")
    assert kind_of(sampling()) is StepKind.SAMPLE


def test_steps_are_counted_by_kind() -> None:
    one = telemetry()
    result = StepResult(1, 1, queued_seconds=0.002, executed_seconds=0.03)
    for made in (plan([1, 1]), plan([5]), plan([5, 1]), plan([]), sampling()):
        one.step_finished(made, result)
    one.step_failed()
    found = scrape(one)
    for kind in StepKind:
        assert found[f"twinplane_worker_step_seconds_count{{kind={kind.value}}}"] == 1
        assert found[f"twinplane_worker_step_seconds_sum{{kind={kind.value}}}"] == 0.03
    assert found["twinplane_worker_step_queue_seconds_count"] == 4
    assert found["twinplane_worker_steps_failed_total"] == 1
    assert found["twinplane_log_records_dropped_total"] == 7


@pytest.mark.parametrize("state", LifecycleState)
def test_one_state_is_on(state: LifecycleState) -> None:
    found = scrape(telemetry(state))
    states = {name: on for name, on in found.items() if "worker_state" in name}
    assert len(states) == len(LifecycleState)
    assert [name for name, on in states.items() if on] == [
        f"twinplane_worker_state{{state={state.value}}}"
    ]


async def test_memory_is_what_the_device_says() -> None:
    one = telemetry()
    before = scrape(one)

    async def ask() -> MemoryPool:
        return POOL

    await one.refresh(ask)
    found = scrape(one)
    for kind, value in MEMORY.items():
        assert found[f"twinplane_worker_memory_bytes{{kind={kind}}}"] == value
    assert found["twinplane_worker_kv_blocks{state=used}"] == 3
    assert found["twinplane_worker_kv_blocks{state=free}"] == 7
    assert before.keys() == found.keys()
    assert not any(v for name, v in before.items() if "memory" in name or "kv_blocks" in name)


async def test_a_busy_device_is_asked_once_and_a_worker_that_loads_says_nothing() -> None:
    one, asked = telemetry(), 0
    answer: asyncio.Future[MemoryPool] = asyncio.get_running_loop().create_future()

    async def ask() -> MemoryPool:
        nonlocal asked
        asked += 1
        return await answer

    for _ in range(3):
        await one.refresh(ask)
    assert asked == 1
    answer.set_result(POOL)
    await until(lambda: scrape(one)["twinplane_worker_memory_bytes{kind=weights}"] == 5000)

    async def loading() -> MemoryPool:
        raise WorkerLoading("the worker loads its model")

    await one.refresh(loading)
    assert scrape(one)["twinplane_worker_memory_bytes{kind=weights}"] == 5000


async def test_a_served_workers_steps_are_counted_and_its_blocks_come_back() -> None:
    one = telemetry()
    async with serving(metrics=one) as rig:
        await rig.attach()
        await one.refresh(rig.facade.memory_pool)
        idle = scrape(one)
        await rig.stub.Forward(first())
        for step_id in range(2, 8):
            await rig.stub.Forward(following(step_id))
        await refusal(rig.stub.Forward(following(99)))
        await one.refresh(rig.facade.memory_pool)
        busy = scrape(one)
        await rig.stub.Forward(forward(8, remove=[0]))
        await one.refresh(rig.facade.memory_pool)
        after = scrape(one)
    assert busy["twinplane_worker_step_seconds_count{kind=prompt}"] == 1
    assert busy["twinplane_worker_step_seconds_count{kind=decode}"] == 6
    assert busy["twinplane_worker_steps_failed_total"] == 1
    assert busy["twinplane_worker_kv_blocks{state=used}"] > 0
    for state in ("used", "free"):
        name = f"twinplane_worker_kv_blocks{{state={state}}}"
        assert after[name] == idle[name]


async def test_asking_while_a_step_runs_delays_nobody() -> None:
    one, device = telemetry(), Device(2)
    async with serving(device, metrics=one) as rig:
        await rig.attach()
        await rig.stub.Forward(first())
        running = asyncio.ensure_future(rig.stub.Forward(following(2)))
        await device.entered()
        for _ in range(5):
            await one.refresh(rig.facade.memory_pool)
        assert not running.done()
        device.open()
        assert len((await running).result.tokens) == 1
        assert len((await rig.stub.Forward(following(3))).result.tokens) == 1


@pytest.mark.parametrize("seed", range(60))
def test_sequences_of_a_length_are_counted_in_whole_blocks(seed: int) -> None:
    rng = random.Random(seed)
    size, blocks = rng.randrange(1, 33), rng.randrange(2, 500)
    pool = replace(POOL, block_count=blocks, block_token_count=size)
    length = rng.randrange(1, 4 * size + 1)
    count, left = 0, blocks - 1
    while left * size >= length:
        left -= -(-length // size)
        count += left >= 0
    assert pool.sequences_of(length) == count
    assert pool.token_count == (blocks - 1) * size
