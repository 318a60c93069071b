"""Packed linear layers against float64, and their batch invariance to the bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.quick import examples, spread
from worker_service.kernels.cpu.library import MAX_GROUP_SIZE, InstructionSet
from worker_service.kernels.cpu.ops import CpuKernels, PackedWeight

GROUPS = (None, 1, 7, 32, 128, 512)
example_budget = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unpack(cpu: CpuKernels, packed: PackedWeight) -> torch.Tensor:
    ids = np.arange(packed.out_features, dtype=np.int32)
    return cpu.embed(packed, ids, torch.empty(packed.out_features, packed.in_features))


def as_int16(x: torch.Tensor, group: int) -> torch.Tensor:
    """Activations as int8 layers take them, in float64, by the definition."""
    parts = []
    for part in x.split(group, dim=1):
        largest = part.abs().amax(dim=1, keepdim=True)
        # A tensor by a tensor: a number by a tensor is its inverse and a product, rounded twice.
        factor = torch.where(largest > 0, torch.full_like(largest, 32767) / largest, 0.0)
        parts.append((part * factor).round().clamp(-32767, 32767).double() * (largest / 32767))
    return torch.cat(parts, dim=1)


@given(
    outputs=st.integers(1, 160),
    inputs=st.integers(1, 700),
    rows=st.one_of(st.integers(1, 20), st.integers(21, 400)),
    group=st.sampled_from(GROUPS),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example_budget
def test_matches_float64(
    cpu: CpuKernels,
    buffers,
    outputs: int,
    inputs: int,
    rows: int,
    group: int | None,
    biased: bool,
    seed: int,
) -> None:
    x, weight = normal(seed, rows, inputs), normal(seed + 1, outputs, inputs)
    bias = normal(seed + 2, outputs) if biased else None
    packed = cpu.pack(weight, group_size=group)
    watched = buffers()
    out = cpu.linear(x, packed, watched.poisoned(rows, outputs), bias=bias)
    watched.check()
    used, given = unpack(cpu, packed).double(), x.double()
    if group is not None:
        given = as_int16(x, min(group, inputs))
    expected = given @ used.T + (0 if bias is None else bias.double())
    magnitude = given.abs() @ used.abs().T + 1
    assert torch.all((out.double() - expected).abs() <= 3e-7 * inputs**0.5 * magnitude)


@given(
    outputs=st.integers(1, 100),
    inputs=st.integers(1, 300),
    group=st.integers(1, 350),
    seed=st.integers(0, 2**31),
)
@example_budget
def test_int8_is_within_half_a_step(
    cpu: CpuKernels, outputs: int, inputs: int, group: int, seed: int
) -> None:
    weight = normal(seed, outputs, inputs)
    weight[0] = 0  # a group of zeros has no scale to divide by
    error = (unpack(cpu, cpu.pack(weight, group_size=group)) - weight).abs()
    for start in range(0, inputs, group):
        part = weight[:, start : start + group].abs().amax(dim=1, keepdim=True)
        assert torch.all(error[:, start : start + group] <= part / 127 * 0.501)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_largest_integers_do_not_overflow(cpu: CpuKernels, sign: float) -> None:
    """All weights and activations at the ends of their range, of like and unlike sign."""
    inputs, outputs = 2 * MAX_GROUP_SIZE, 70
    weight = torch.ones(outputs, inputs)
    weight[::2] = -1
    x = torch.full((9, inputs), sign)
    packed = cpu.pack(weight, group_size=MAX_GROUP_SIZE)
    out = cpu.linear(x, packed, torch.empty(9, outputs))
    torch.testing.assert_close(out, x @ weight.T, rtol=1e-6, atol=0)


def test_groups_of_very_small_and_of_no_activations(cpu: CpuKernels) -> None:
    """Neither divides by nothing nor overflows; what is far below one counts as nothing."""
    x = torch.zeros(4, 256)
    x[1, :128] = 1e-38
    x[2, 128:], x[3, 0] = 1e-20, -3.0
    packed = cpu.pack(normal(1, 40, 256), group_size=128)
    out = cpu.linear(x, packed, torch.empty(4, 40))
    assert torch.equal(out[0], torch.zeros(40))
    expected = x.double() @ unpack(cpu, packed).double().T
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-30)


def test_unpacking_float32_is_exact(cpu: CpuKernels) -> None:
    weight = normal(5, 101, 37)
    assert torch.equal(unpack(cpu, cpu.pack(weight)), weight)


@pytest.mark.parametrize("group", spread([None, 32, 128], 1))
@pytest.mark.parametrize(("outputs", "inputs"), [(200, 576), (96, 1536), (49, 130)])
def test_rows_do_not_depend_on_their_batch(
    cpu: CpuKernels, alone: CpuKernels, outputs: int, inputs: int, group: int | None
) -> None:
    """Any rows, in any order and number, on one thread or two: the same bits per row."""
    rows = 300
    x, bias = normal(1, rows, inputs), normal(2, outputs)
    packed = cpu.pack(normal(3, outputs, inputs), group_size=group)
    whole = cpu.linear(x, packed, torch.empty(rows, outputs), bias=bias)
    generator = torch.Generator().manual_seed(4)
    for count in (1, 2, 3, 5, 8, 9, 13, 16, 17, 31, 64, 127, 129, 255, 300):
        chosen = torch.randperm(rows, generator=generator)[:count]
        for kernels in (cpu, alone):
            part = kernels.linear(x[chosen], packed, torch.empty(count, outputs), bias=bias)
            assert torch.equal(part.view(torch.int32), whole[chosen].view(torch.int32)), count


def test_every_row_alone(cpu: CpuKernels, alone: CpuKernels) -> None:
    x, packed = normal(1, 40, 576), cpu.pack(normal(3, 100, 576))
    whole = cpu.linear(x, packed, torch.empty(40, 100))
    for row in range(40):
        own = alone.linear(x[row : row + 1], packed, torch.empty(1, 100))
        assert torch.equal(own[0], whole[row])


def test_more_threads_than_processors_and_many_short_calls(
    cpu: CpuKernels, open_cpu: Callable[[int, InstructionSet | None], CpuKernels]
) -> None:
    """Work changes hands all the time; every call is complete when it returns."""
    crowd = open_cpu(7, cpu.context.instruction_set)
    x, packed = normal(1, 3, 40), cpu.pack(normal(3, 700, 40))
    expected = cpu.linear(x, packed, torch.empty(3, 700))
    for _ in range(300):
        out = torch.full((3, 700), float("nan"))
        assert torch.equal(crowd.linear(x, packed, out), expected)


def test_no_rows(cpu: CpuKernels) -> None:
    packed = cpu.pack(normal(3, 10, 8))
    assert cpu.linear(torch.empty(0, 8), packed, torch.empty(0, 10)).shape == (0, 10)


@pytest.mark.parametrize("group", [None, 32, 7])
def test_infinities_and_nan_stay_in_their_row(cpu: CpuKernels, group: int | None) -> None:
    x = normal(1, 12, 64)
    packed = cpu.pack(normal(3, 50, 64), group_size=group)
    clean = cpu.linear(x, packed, torch.empty(12, 50)).clone()
    x[4, 7], x[9, 3] = float("nan"), float("inf")
    out = cpu.linear(x, packed, torch.empty(12, 50))
    others = [row for row in range(12) if row not in (4, 9)]
    assert torch.equal(out[others], clean[others])
    assert torch.isnan(out[4]).all() and not torch.isfinite(out[9]).any()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("group", [None, 32])
def test_a_broken_weight_is_seen_in_its_output(
    cpu: CpuKernels, group: int | None, broken: float
) -> None:
    weight = normal(3, 50, 64)
    weight[7, 40] = broken
    out = cpu.linear(normal(1, 3, 64), cpu.pack(weight, group_size=group), torch.empty(3, 50))
    finite = torch.isfinite(out)
    assert not finite[:, 7].any() and finite[:, torch.arange(50) != 7].all()


def test_wrong_arguments_are_refused(cpu: CpuKernels) -> None:
    packed = cpu.pack(normal(3, 10, 8))
    with pytest.raises(AssertionError):
        cpu.linear(torch.empty(2, 9), packed, torch.empty(2, 10))
    with pytest.raises(AssertionError):
        cpu.linear(torch.empty(2, 8, dtype=torch.float64), packed, torch.empty(2, 10))
    with pytest.raises(AssertionError):
        cpu.linear(torch.empty(8, 2).T, packed, torch.empty(2, 10))
