"""Norm, activation and rotary embedding against float64."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.quick import examples
from worker_service.domain.batch import StepBatch
from worker_service.kernels.cpu.ops import (
    CpuKernels,
    HeadNorms,
    PagedCache,
    RopeTables,
)

example_budget = settings(
    max_examples=examples(25),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(0, 60),
    width=st.integers(1, 700),
    added=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example_budget
def test_rms_norm(cpu: CpuKernels, buffers, rows: int, width: int, added: bool, seed: int) -> None:
    x, weight, delta = (
        normal(seed, rows, width),
        normal(seed + 1, width),
        normal(seed + 2, rows, width),
    )
    residual = x + delta if added else x.clone()
    watched = buffers()
    out = cpu.rms_norm(
        x, weight, 1e-5, watched.poisoned(rows, width), added=delta if added else None
    )
    watched.check()
    assert torch.equal(x, residual)
    exact = residual.double()
    exact = exact / (exact.square().mean(dim=1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=1e-6)


def test_rms_norm_rows_are_independent(cpu: CpuKernels, alone: CpuKernels) -> None:
    x, weight = normal(1, 50, 577), normal(2, 577)
    whole = cpu.rms_norm(x.clone(), weight, 1e-6, torch.empty(50, 577))
    for row in range(50):
        own = alone.rms_norm(x[row : row + 1].clone(), weight, 1e-6, torch.empty(1, 577))
        assert torch.equal(own[0], whole[row])


@given(rows=st.integers(0, 20), width=st.integers(1, 300), seed=st.integers(0, 2**31))
@example_budget
def test_silu_multiply(cpu: CpuKernels, buffers, rows: int, width: int, seed: int) -> None:
    gate_up = normal(seed, rows, 2 * width) * 20
    watched = buffers()
    out = cpu.silu_multiply(gate_up, watched.poisoned(rows, width))
    watched.check()
    gate, up = gate_up.double().split(width, dim=1)
    torch.testing.assert_close(
        out.double(), torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-30
    )


def test_silu_at_the_edges(cpu: CpuKernels) -> None:
    gate = torch.tensor([[0.0, -0.0, 200.0, -200.0, math.inf, math.nan, 1e-30, 3e38]])
    out = cpu.silu_multiply(torch.cat([gate, torch.ones_like(gate)], dim=1), torch.empty(1, 8))[0]
    assert out[0] == 0 and out[1] == 0 and out[2] == 200.0 and abs(out[3]) < 1e-30
    assert out[4] == math.inf and math.isnan(out[5]) and out[7] == torch.tensor(3e38)


def test_exponential_is_within_two_units_in_the_last_place(cpu: CpuKernels) -> None:
    """silu(x) / x is 1 / (1 + e^-x); for very negative x it is e^x but for the last bits."""
    x = -torch.linspace(18, 86, 200_000).reshape(1, -1)
    out = cpu.silu_multiply(torch.cat([x, torch.ones_like(x)], dim=1), torch.empty_like(x))
    exact = x.double() / (1 + torch.exp(-x.double()))
    assert float(((out.double() - exact) / exact).abs().max()) < 4 * 2**-24


@given(
    tokens=st.integers(0, 40),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 1)]),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 32), (32, 8)]),
    stored=st.sampled_from([torch.float32, torch.bfloat16]),
    normed=st.booleans(),
    seed=st.integers(0, 2**31),
)
@example_budget
def test_rope_and_cache_write(
    cpu: CpuKernels,
    tokens: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    stored: torch.dtype,
    normed: bool,
    seed: int,
) -> None:
    (q_heads, kv_heads), (head_dim, rotary_dim) = heads, dims
    rng = np.random.default_rng(seed)
    angles = torch.arange(50).double()[:, None] * torch.linspace(0.01, 1, rotary_dim // 2).double()
    tables = RopeTables(angles.cos().float(), angles.sin().float())
    positions = rng.integers(0, 50, tokens).astype(np.int32)
    slots = rng.permutation(64)[:tokens].astype(np.int32)
    slots[: tokens // 5] = -1
    cache = PagedCache(
        torch.full((8, kv_heads, head_dim, 8), 7.0, dtype=stored),
        torch.full((8, kv_heads, 8, head_dim), 7.0, dtype=stored),
    )
    starts = np.array([0, tokens], dtype=np.int32)
    one = np.ones(1, dtype=np.int32)
    batch = StepBatch(starts, one, np.zeros((1, 1), dtype=np.int32), positions, slots, slots)
    qkv = normal(seed, tokens, (q_heads + 2 * kv_heads) * head_dim)
    norms = HeadNorms(normal(1, head_dim), normal(2, head_dim), 1e-6) if normed else None
    before = qkv.double().view(tokens, q_heads + 2 * kv_heads, head_dim)
    cpu.rope_write(qkv, tables, cache, batch, norms=norms)

    rotated = before[:, : q_heads + kv_heads]
    if norms is not None:
        weights = torch.cat(
            [norms.query.expand(q_heads, -1), norms.key.expand(kv_heads, -1)]
        ).double()
        rotated = rotated / (rotated.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weights
    half = rotary_dim // 2
    cos, sin = angles[positions].cos()[:, None], angles[positions].sin()[:, None]
    low, high = rotated[..., :half], rotated[..., half:rotary_dim]
    expected = torch.cat(
        [low * cos - high * sin, high * cos + low * sin, rotated[..., rotary_dim:]], dim=-1
    )
    after = qkv.view(tokens, q_heads + 2 * kv_heads, head_dim)
    torch.testing.assert_close(
        after[:, : q_heads + kv_heads].double(), expected, rtol=1e-5, atol=2e-6
    )
    assert torch.equal(after[:, q_heads + kv_heads :].double(), before[:, q_heads + kv_heads :])
    keys, values = after[:, q_heads : q_heads + kv_heads], after[:, q_heads + kv_heads :]
    for cached, written in ((cache.keys.mT, keys), (cache.values, values)):
        wanted = torch.full((64, kv_heads, head_dim), 7.0, dtype=stored)
        kept = slots >= 0
        wanted[slots[kept]] = written[torch.from_numpy(kept)].to(stored)
        assert torch.equal(cached.transpose(1, 2).reshape(64, kv_heads, head_dim), wanted)
