"""The adapters' kernel: right against float64, and the same bits whatever else is in the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quick import examples
from worker_service.domain.adapters import AdaptedPart, AdapterLimits
from worker_service.domain.batch import StepBatch
from worker_service.kernels.cpu.adapters import CompiledAdapters, StepAdapters, runs_of
from worker_service.kernels.cpu.ops import CpuKernels
from worker_service.kernels.low_rank import LowRank

INPUTS, SIZES = 53, (67, 20, 33)
MAX_RANK, SLOTS = 24, 4
OUTPUTS = sum(SIZES)


def parts() -> tuple[AdaptedPart, ...]:
    firsts = np.cumsum([0, *SIZES[:-1]]).tolist()
    return tuple(
        AdaptedPart(f"p{index}", first, range(size), range(INPUTS))
        for index, (first, size) in enumerate(zip(firsts, SIZES, strict=True))
    )


def store(cpu: CpuKernels) -> CompiledAdapters:
    layer = (parts(), (), (), ())
    return CompiledAdapters([layer], AdapterLimits(SLOTS, MAX_RANK), cpu.context.head_dim_multiple)


def pair(seed: int, size: int, rank: int, kept: torch.dtype) -> LowRank:
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(rank, INPUTS, generator=generator).to(kept)
    b = torch.randn(size, rank, generator=generator).to(kept)
    return LowRank(a, b, 0.5 + seed % 5)


def adapter(seed: int, rank: int, kept: torch.dtype = torch.float32) -> dict[str, LowRank]:
    """Every third one leaves a part alone."""
    return {
        f"p{index}": pair(seed + index, size, rank, kept)
        for index, size in enumerate(SIZES)
        if (seed + index) % 3
    }


def batch_of(slots: list[int], lengths: list[int]) -> StepBatch:
    total = sum(lengths)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    none = np.zeros(total, dtype=np.int32)
    return StepBatch(
        starts,
        np.array(lengths, dtype=np.int32),
        np.zeros((len(lengths), 1), dtype=np.int32),
        none,
        none,
        none,
        np.array(slots, dtype=np.int32),
    )


def step_of(adapters: CompiledAdapters, slots: list[int], lengths: list[int]) -> StepAdapters:
    step = adapters.runs_of(batch_of(slots, lengths))
    assert step is not None
    return step


def test_it_adds_each_rows_own_adapter_and_nothing_to_the_others(
    cpu: CpuKernels, alone: CpuKernels
) -> None:
    adapters = store(cpu)
    kinds = {1: torch.float32, 2: torch.bfloat16, 3: torch.float32, 4: torch.float32}
    ranks = (1, 16, 24, 7)
    loaded = {
        slot: adapter(slot, rank, kinds[slot]) for slot, rank in zip(kinds, ranks, strict=True)
    }
    for slot, modules in loaded.items():
        adapters.prepare(modules)
        adapters.put(slot)
    slots, lengths = [2, 0, 1, 3, 2, 4], [5, 3, 1, 70, 1, 9]
    x = torch.randn(sum(lengths), INPUTS)
    y = torch.randn(sum(lengths), OUTPUTS)
    of_tokens = np.repeat(slots, lengths)
    expected = y.double()
    for index, part in enumerate(parts()):
        for token, slot in enumerate(of_tokens.tolist()):
            low = loaded.get(slot, {}).get(f"p{index}")
            if low is not None:
                added = low.scale * (low.b.double() @ (low.a.double() @ x[token].double()))
                expected[token, part.first : part.first + len(part.outputs)] += added
    before, single = y.clone(), y.clone()
    step = step_of(adapters, slots, lengths)
    adapters.apply(cpu, step, (0, 0), x, y)
    adapters.apply(alone, step, (0, 0), x, single)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(y, single)
    assert torch.equal(y[of_tokens == 0], before[of_tokens == 0])


def test_a_tokens_bits_do_not_depend_on_the_batch(cpu: CpuKernels) -> None:
    adapters = store(cpu)
    for slot in range(1, SLOTS + 1):
        adapters.prepare(adapter(slot, 16, torch.bfloat16 if slot == 2 else torch.float32))
        adapters.put(slot)
    x = torch.randn(90, INPUTS)
    y = torch.randn(90, OUTPUTS)
    lengths = [1] * 20 + [40, 30]
    slots = [1 + index % SLOTS for index in range(20)] + [2, 3]
    together = y.clone()
    adapters.apply(cpu, step_of(adapters, slots, lengths), (0, 0), x, together)
    for token, slot in enumerate(np.repeat(slots, lengths).tolist()):
        own = y[token : token + 1].clone()
        adapters.apply(cpu, step_of(adapters, [slot], [1]), (0, 0), x[token : token + 1], own)
        assert torch.equal(own[0], together[token])


def test_an_adapter_of_zeros_changes_no_bit(cpu: CpuKernels) -> None:
    adapters = store(cpu)
    low = adapter(1, 8)
    adapters.prepare({name: LowRank(each.a, each.b * 0, 3.0) for name, each in low.items()})
    adapters.put(1)
    x, y = torch.randn(6, INPUTS), torch.randn(6, OUTPUTS)
    before = y.clone()
    adapters.apply(cpu, step_of(adapters, [1], [6]), (0, 0), x, y)
    assert torch.equal(y, before)


@pytest.mark.parametrize("group_size", [None, 32])
@pytest.mark.parametrize("rows", [1, 9, 32, 130])
def test_beside_the_projection_it_adds_the_same_bits(
    cpu: CpuKernels, alone: CpuKernels, rows: int, group_size: int | None
) -> None:
    adapters = store(cpu)
    for slot in range(1, SLOTS + 1):
        adapters.prepare(adapter(slot, 24 - slot, torch.bfloat16 if slot == 2 else torch.float32))
        adapters.put(slot)
    weight = cpu.pack(torch.randn(OUTPUTS, INPUTS), group_size=group_size)
    x = torch.randn(rows, INPUTS)
    slots = [index % (SLOTS + 1) for index in range(rows)]
    step = step_of(adapters, slots, [1] * rows) if any(slots) else step_of(adapters, [3], [1])
    apart = cpu.linear(x, weight, torch.empty(rows, OUTPUTS))
    adapters.apply(cpu, step, (0, 0), x, apart)
    for kernels in (cpu, alone):
        beside = torch.full((rows, OUTPUTS), float("nan"))
        adapters.apply(kernels, step, (0, 0), x, beside, weight)
        assert torch.equal(beside, apart)


def test_a_slot_that_is_emptied_or_filled_anew_holds_nothing_of_before(cpu: CpuKernels) -> None:
    adapters = store(cpu)
    x, y = torch.randn(2, INPUTS), torch.randn(2, OUTPUTS)

    def run(slot: int) -> torch.Tensor:
        out = y.clone()
        adapters.apply(cpu, step_of(adapters, [slot], [2]), (0, 0), x, out)
        return out

    def load(slot: int, seed: int) -> None:
        adapters.prepare(adapter(seed, 4 + seed))
        adapters.put(slot)

    load(1, 1)
    load(2, 2)
    first, second = run(1), run(2)
    load(1, 5)
    assert torch.equal(run(2), second)
    adapters.prepare(adapter(9, 3))  # never put: nobody sees it
    assert torch.equal(run(2), second)
    adapters.clear(1)
    assert torch.equal(run(1), y)
    load(1, 1)
    assert torch.equal(run(1), first)
    assert torch.equal(run(2), second)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 70)), min_size=1, max_size=8))
@settings(max_examples=examples(60), deadline=None)
def test_runs_have_every_token_with_an_adapter_once(rows: list[tuple[int, int]]) -> None:
    slots = np.array([slot for slot, _ in rows], dtype=np.int32)
    lengths = np.array([length for _, length in rows], dtype=np.int32)
    of_tokens = np.repeat(slots, lengths)
    query_starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    starts, own, tokens = runs_of(slots, query_starts)
    assert sorted(tokens.tolist()) == np.flatnonzero(of_tokens).tolist()
    assert starts[0] == 0 and starts[-1] == tokens.size
    for start, end, slot in zip(starts, starts[1:], own, strict=False):
        assert start < end
        assert (of_tokens[tokens[start:end]] == slot + 1).all()


@pytest.mark.parametrize("rank", [1, 8, 16, MAX_RANK])
def test_the_memory_that_is_planned_holds_the_largest_adapter(cpu: CpuKernels, rank: int) -> None:
    adapters = store(cpu)
    modules = {
        f"p{index}": pair(index, size, rank, torch.float32) for index, size in enumerate(SIZES)
    }
    adapters.prepare(modules)
    assert adapters.put(1) * (SLOTS + 1) == adapters.byte_count
