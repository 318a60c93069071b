"""Paged attention against float64, and its batch invariance to the bit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.quick import examples, spread
from worker_service.domain.batch import StepBatch
from worker_service.kernels.cpu.ops import CpuKernels, PagedCache

example_budget = settings(
    max_examples=examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
BLOCK = 16
LONG = 700  # over the second of the kernel's context splits


@dataclass(frozen=True, slots=True)
class Heads:
    """Query heads, KV heads and their width."""

    query: int
    kv: int
    dim: int


SHAPES = (Heads(9, 3, 64), Heads(4, 4, 16), Heads(6, 1, 80), Heads(16, 2, 128), Heads(3, 3, 256))


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """Sequences' whole K, V and queries [tokens, heads, dim], and the cache that holds K and V.

    Slots that belong to no sequence are NaN, the null block included.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    queries: list[torch.Tensor]
    tables: list[list[int]]
    cache: PagedCache


def store(
    lengths: list[int], heads: Heads, dtype: torch.dtype, seed: int, block: int = BLOCK
) -> Stored:
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-length // block) for length in lengths]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    shape = (sum(counts) + 1, heads.kv, block, heads.dim)
    cache = PagedCache(
        torch.full(shape, float("nan"), dtype=dtype).mT.contiguous(),
        torch.full(shape, float("nan"), dtype=dtype),
    )
    stored = Stored([], [], [], [], cache)
    for length, count in zip(lengths, counts, strict=True):
        table, order = order[:count], order[count:]
        keys, values = torch.randn(2, length, heads.kv, heads.dim, generator=generator).to(dtype)
        stored.queries.append(torch.randn(length, heads.query, heads.dim, generator=generator) * 3)
        blocks = torch.tensor([table[i // block] for i in range(length)])
        offsets = torch.arange(length) % block
        cache.keys[blocks, :, :, offsets] = keys
        cache.values[blocks, :, offsets] = values
        stored.keys.append(keys)
        stored.values.append(values)
        stored.tables.append(table)
    return stored


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of a sequence, scheduled in one step."""

    sequence: int
    start: int
    end: int


def attend(
    cpu: CpuKernels,
    stored: Stored,
    chunks: list[Chunk],
    out: torch.Tensor,
    *,
    window: int | None = None,
    padding: int = 2,
) -> torch.Tensor:
    lengths = np.array([chunk.end - chunk.start for chunk in chunks], dtype=np.int32)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    width = max(len(stored.tables[chunk.sequence]) for chunk in chunks) + padding
    tables = np.zeros((len(chunks), width), dtype=np.int32)
    for row, chunk in enumerate(chunks):
        table = stored.tables[chunk.sequence]
        tables[row, : len(table)] = table
    tokens = int(starts[-1])
    batch = StepBatch(
        starts,
        np.array([chunk.end for chunk in chunks], dtype=np.int32),
        tables,
        *(np.zeros(tokens, dtype=np.int32) for _ in range(3)),
    )
    queries = torch.cat([stored.queries[c.sequence][c.start : c.end] for c in chunks])
    scale = queries.shape[2] ** -0.5
    return cpu.attention(queries, stored.cache, batch, out, scale=scale, window=window)


def reference(stored: Stored, chunk: Chunk, window: int | None) -> torch.Tensor:
    """Float64 outputs [tokens, heads, dim]."""
    keys, values = (
        whole[chunk.sequence][: chunk.end].double() for whole in (stored.keys, stored.values)
    )
    queries = stored.queries[chunk.sequence][chunk.start : chunk.end].double()
    group = queries.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", queries, keys) * queries.shape[2] ** -0.5
    own = torch.arange(chunk.start, chunk.end)[:, None]
    key = torch.arange(chunk.end)[None]
    hidden = (key > own) | (key <= own - window if window else torch.zeros_like(key > own))
    scores = scores.masked_fill(hidden, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)


chunk_ends = st.one_of(
    st.sampled_from([1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 512, 513]), st.integers(1, 300)
)


@given(
    ends=st.lists(chunk_ends, min_size=1, max_size=3),
    fractions=st.lists(st.sampled_from([0.0, 0.3, 0.9, 1.0]), min_size=3, max_size=3),
    shape=st.sampled_from(SHAPES),
    window=st.sampled_from([None, 1, 5, 16, 64, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    block=st.sampled_from([1, 16, 24]),
    seed=st.integers(0, 2**31),
)
@example_budget
def test_matches_float64(
    cpu: CpuKernels,
    buffers,
    ends: list[int],
    fractions: list[float],
    shape: Heads,
    window: int | None,
    dtype: torch.dtype,
    block: int,
    seed: int,
) -> None:
    """Chunks that start anywhere, empty ones and decodes; unwritten slots would poison it."""
    stored = store(ends, shape, dtype, seed, block)
    chunks = [
        Chunk(sequence, min(int(end * fraction), end), end)
        for sequence, (end, fraction) in enumerate(zip(ends, fractions, strict=False))
    ]
    tokens = sum(chunk.end - chunk.start for chunk in chunks)
    watched = buffers()
    out = watched.poisoned(tokens, shape.query, shape.dim)
    attend(cpu, stored, chunks, out, window=window)
    watched.check()
    done = 0
    for chunk in chunks:
        count = chunk.end - chunk.start
        expected = reference(stored, chunk, window)
        torch.testing.assert_close(out[done : done + count].double(), expected, rtol=0, atol=2e-5)
        done += count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("shape", spread(SHAPES[:3], 1), ids=str)
def test_rows_do_not_depend_on_chunks_mates_or_threads(
    cpu: CpuKernels, alone: CpuKernels, shape: Heads, window: int | None, dtype: torch.dtype
) -> None:
    """Whole, chunked at any width, decoded alone or among others: the same bits per row."""
    stored = store([LONG, 130, 20], shape, dtype, 3)
    whole = attend(
        cpu, stored, [Chunk(0, 0, LONG)], torch.empty(LONG, shape.query, shape.dim), window=window
    ).view(torch.int32)
    for chunks in (
        [Chunk(0, 0, 1), Chunk(1, 0, 130)],
        [Chunk(0, 257, 258)],
        [Chunk(2, 3, 20), Chunk(0, LONG - 1, LONG), Chunk(1, 129, 130)],
        [Chunk(1, 0, 130), Chunk(0, 64, 80)],
        [Chunk(0, 1, 333), Chunk(2, 19, 20)],
        [Chunk(0, 333, LONG)],
        [Chunk(1, 120, 130), Chunk(2, 0, 20), Chunk(0, 511, 515)],
    ):
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        for kernels in (cpu, alone):
            out = attend(
                kernels, stored, chunks, torch.empty(tokens, shape.query, shape.dim), window=window
            )
            done = 0
            for chunk in chunks:
                count = chunk.end - chunk.start
                if chunk.sequence == 0:
                    own = out[done : done + count].view(torch.int32)
                    assert torch.equal(own, whole[chunk.start : chunk.end]), chunk
                done += count


def test_freed_blocks_before_the_window_are_not_read(cpu: CpuKernels) -> None:
    """Their table entries may point at the null block, which holds NaN here."""
    shape, window, chunk = Heads(9, 3, 64), 40, Chunk(0, 290, 300)
    stored = store([300], shape, torch.float32, 5)
    expected = reference(stored, chunk, window)
    stored.tables[0][: (290 - window + 1) // BLOCK] = [0] * ((290 - window + 1) // BLOCK)
    out = attend(cpu, stored, [chunk], torch.empty(10, 9, 64), window=window)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5)


def test_large_scores_do_not_overflow(cpu: CpuKernels) -> None:
    shape = Heads(4, 4, 16)
    stored = store([300], shape, torch.float32, 7)
    stored.queries[0] *= 1000
    chunk = Chunk(0, 0, 300)
    out = attend(cpu, stored, [chunk], torch.empty(300, 4, 16))
    expected = reference(stored, chunk, None)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=5e-3)


def test_a_poisoned_row_shows(cpu: CpuKernels) -> None:
    shape = Heads(9, 3, 64)
    stored = store([100, 50], shape, torch.float32, 9)
    stored.queries[0][99, 4] = float("nan")
    out = attend(cpu, stored, [Chunk(0, 98, 100), Chunk(1, 49, 50)], torch.empty(3, 9, 64))
    assert torch.isnan(out[1, 4]).all()
    assert torch.isfinite(out[0]).all() and torch.isfinite(out[2]).all()
    assert torch.isfinite(out[1, :4]).all() and torch.isfinite(out[1, 5:]).all()


def test_strided_queries(cpu: CpuKernels) -> None:
    """A slice of the fused projection is read where it lies."""
    shape = Heads(9, 3, 64)
    stored = store([70], shape, torch.float32, 11)
    fused = torch.full((70, 15, 64), float("nan"))
    fused[:, :9] = stored.queries[0]
    starts, ends = np.array([0, 70], dtype=np.int32), np.array([70], dtype=np.int32)
    table = np.array([stored.tables[0]], dtype=np.int32)
    batch = StepBatch(starts, ends, table, *(np.zeros(70, np.int32) for _ in range(3)))
    out = cpu.attention(fused[:, :9], stored.cache, batch, torch.empty(70, 9, 64), scale=0.125)
    expected = attend(cpu, stored, [Chunk(0, 0, 70)], torch.empty(70, 9, 64))
    assert torch.equal(out, expected)
