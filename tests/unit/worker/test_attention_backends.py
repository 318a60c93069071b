"""The fast backend against the one that is obviously right, and how its rows keep apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.quick import examples
from worker_service.attention.interface import (
    AttentionConfig,
    BackendType,
    LayerAttention,
    LayerCache,
)
from worker_service.attention.reference import REFERENCE
from worker_service.attention.torch_backend import TORCH
from worker_service.domain.batch import StepBatch


@dataclass(frozen=True, slots=True)
class Shape:
    """A model's attention, one layer per window."""

    head_count: int
    kv_head_count: int
    head_dim: int
    block_size: int
    windows: tuple[int | None, ...]
    max_length: int = 1200

    def config(self) -> AttentionConfig:
        return AttentionConfig(
            layers=tuple(
                LayerAttention(self.head_count, self.kv_head_count, self.head_dim, 0.31, window)
                for window in self.windows
            ),
            block_size=self.block_size,
            max_length=self.max_length,
            data_type=torch.float32,
            device=torch.device("cpu"),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Rows with all their queries, keys and values [layers, tokens, heads, head_dim], and the
    blocks each owns."""

    shape: Shape
    queries: list[torch.Tensor]
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    blocks: list[np.ndarray]


def sequences(shape: Shape, lengths: list[int], seed: int) -> Sequences:
    generator = torch.Generator().manual_seed(seed)
    layers = len(shape.windows)

    def numbers(heads: int) -> list[torch.Tensor]:
        return [
            torch.randn(layers, length, heads, shape.head_dim, generator=generator)
            for length in lengths
        ]

    counts = [-(-length // shape.block_size) for length in lengths]
    order = np.random.default_rng(seed).permutation(sum(counts)) + 1
    blocks = np.split(order.astype(np.int32), np.cumsum(counts)[:-1])
    return Sequences(
        shape,
        numbers(shape.head_count),
        numbers(shape.kv_head_count),
        numbers(shape.kv_head_count),
        blocks,
    )


class Device:
    """One backend over its own cache."""

    def __init__(self, kind: BackendType, shape: Shape, block_count: int) -> None:
        size = (block_count, shape.block_size, shape.kv_head_count, shape.head_dim)
        caches = tuple(LayerCache(torch.zeros(size), torch.zeros(size)) for _ in shape.windows)
        self.backend = kind.create(shape.config(), caches)

    def step(self, data: Sequences, rows: dict[int, tuple[int, int]]) -> dict[int, torch.Tensor]:
        """Runs tokens start to end of each row; [layers, tokens, heads, head_dim] of each."""
        shape = data.shape
        spans = list(rows.values())
        lengths = np.array([end - start for start, end in spans], dtype=np.int32)
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        contexts = np.array([end for _, end in spans], dtype=np.int32)
        width = int(-(-contexts.max() // shape.block_size))
        tables = np.zeros((len(rows), width), dtype=np.int32)
        slots = []
        for index, (row, (start, end)) in enumerate(rows.items()):
            owned = data.blocks[row][:width]
            tables[index, : owned.size] = owned
            positions = np.arange(start, end)
            slots.append(
                data.blocks[row][positions // shape.block_size] * shape.block_size
                + positions % shape.block_size
            )
        step = self.backend.plan(
            StepBatch(starts, contexts, tables, *[np.concatenate(slots).astype(np.int32)] * 3)
        )
        layers = []
        for layer in range(len(shape.windows)):
            queries, keys, values = (
                torch.cat([part[row][layer, start:end] for row, (start, end) in rows.items()])
                for part in (data.queries, data.keys, data.values)
            )
            step.write_kv(layer, keys, values)
            layers.append(step.forward(layer, queries))
        out = torch.stack(layers)
        return {row: out[:, starts[index] : starts[index + 1]] for index, row in enumerate(rows)}


shapes = st.builds(
    Shape,
    head_count=st.just(0),
    kv_head_count=st.sampled_from([1, 2, 3]),
    head_dim=st.sampled_from([8, 16, 64]),
    block_size=st.sampled_from([1, 4, 5, 16, 32]),
    windows=st.lists(st.sampled_from([None, 1, 3, 17, 40]), min_size=1, max_size=2).map(tuple),
    max_length=st.just(130),
)


@settings(max_examples=examples(60), deadline=None)
@given(shapes, st.sampled_from([1, 2, 3, 8]), st.integers(0, 2**31), st.data())
def test_torch_equals_reference(shape: Shape, group: int, seed: int, data: st.DataObject) -> None:
    """Random rows advance by random spans in random company until all are done."""
    shape = Shape(
        shape.kv_head_count * group,
        shape.kv_head_count,
        shape.head_dim,
        shape.block_size,
        shape.windows,
        shape.max_length,
    )
    lengths = data.draw(st.lists(st.integers(1, 130), min_size=1, max_size=5))
    rows = sequences(shape, lengths, seed)
    block_count = 1 + sum(len(blocks) for blocks in rows.blocks)
    fast, slow = (Device(kind, shape, block_count) for kind in (TORCH, REFERENCE))
    done = dict.fromkeys(range(len(lengths)), 0)
    for _ in range(4):
        spans = {
            row: (start, data.draw(st.sampled_from([start + 1, lengths[row]])))
            for row, start in done.items()
            if start < lengths[row]
        }
        if not spans:
            break
        got, expected = fast.step(rows, spans), slow.step(rows, spans)
        for row, (_, end) in spans.items():
            torch.testing.assert_close(got[row], expected[row], rtol=1e-4, atol=1e-5)
            done[row] = end


@pytest.mark.parametrize("window", [None, 30, 600])
def test_long_contexts_cross_every_tile(window: int | None) -> None:
    """Longer than the kernel's key tile and our query tile, with windows that hide whole tiles."""
    shape = Shape(6, 2, 16, 16, (window,))
    rows = sequences(shape, [1150, 700], 1)
    fast, slow = (Device(kind, shape, 200) for kind in (TORCH, REFERENCE))
    for spans in ({0: (0, 1149), 1: (0, 640)}, {1: (640, 699)}, {0: (1149, 1150), 1: (699, 700)}):
        got, expected = fast.step(rows, spans), slow.step(rows, spans)
        for row in spans:
            torch.testing.assert_close(got[row], expected[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("group", [1, 2, 3, 4])
@pytest.mark.parametrize("window", [None, 50])
def test_company_and_chunks_change_a_row_by_rounding_only(group: int, window: int | None) -> None:
    shape = Shape(2 * group, 2, 64, 16, (window,))
    rows = sequences(shape, [300, 41, 190, 600], 2)
    whole = Device(TORCH, shape, 200)
    expected = {
        row: whole.step(rows, {row: (0, len(rows.queries[row][0]))})[row] for row in range(4)
    }
    chunked = Device(TORCH, shape, 200)
    chunked.step(rows, {0: (0, 298), 3: (0, 1)})
    for spans in (
        {0: (298, 299), 1: (0, 2), 3: (1, 257)},
        {2: (0, 189), 0: (299, 300), 1: (2, 40), 3: (257, 599)},
        {1: (40, 41), 2: (189, 190), 3: (599, 600)},
    ):
        got = chunked.step(rows, spans)
        for row, (start, end) in spans.items():
            torch.testing.assert_close(got[row], expected[row][:, start:end], rtol=1e-4, atol=1e-5)


def test_rows_of_very_different_lengths_share_a_step() -> None:
    """Decoding rows whose padded contexts would not fit the gather buffers together."""
    shape = Shape(2, 1, 8, 4, (None,), max_length=20000)
    lengths = [17000, 3, 900, 8500, 40, 16000]
    rows = sequences(shape, lengths, 4)
    block_count = 1 + sum(len(blocks) for blocks in rows.blocks)
    devices = [Device(kind, shape, block_count) for kind in (TORCH, REFERENCE)]
    results = []
    for device in devices:
        fill = {row: (0, length - 1) for row, length in enumerate(lengths)}
        write_only(device, rows, fill)
        results.append(
            device.step(rows, {row: (length - 1, length) for row, length in enumerate(lengths)})
        )
    for row in range(len(lengths)):
        torch.testing.assert_close(results[0][row], results[1][row], rtol=1e-4, atol=1e-5)


def write_only(device: Device, data: Sequences, rows: dict[int, tuple[int, int]]) -> None:
    """Writes the rows' KV without attending."""
    for row, (start, end) in rows.items():
        positions = np.arange(start, end)
        size = data.shape.block_size
        blocks = data.blocks[row]
        slots = (blocks[positions // size] * size + positions % size).astype(np.int32)
        step = device.backend.plan(
            StepBatch(
                np.array([0, 1], dtype=np.int32),
                np.array([1], dtype=np.int32),
                blocks[None, :1],
                *[slots] * 3,
            )
        )
        for layer in range(len(data.shape.windows)):
            step.write_kv(
                layer, data.keys[row][layer, start:end], data.values[row][layer, start:end]
            )
