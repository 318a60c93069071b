"""The fused decoder: equal to its single kernels to the bit, and right against float64."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from worker_service.domain.batch import StepBatch
from worker_service.kernels.cpu.decoder import Decoder, DecoderLayer, DecoderShape, Projection
from worker_service.kernels.cpu.ops import (
    CpuKernels,
    HeadNorms,
    PagedCache,
    RopeTables,
)

HIDDEN, INNER, Q_HEADS, KV_HEADS, DIM, VOCABULARY, LAYERS = 96, 160, 6, 2, 16, 211, 3
BLOCK, LENGTH = 4, 37
SHAPE = DecoderShape(HIDDEN, INNER, Q_HEADS, 1e-5, DIM**-0.5)


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """One layer's float32 weights."""

    qkv: torch.Tensor
    qkv_bias: torch.Tensor
    output: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norms: torch.Tensor
    head_norms: torch.Tensor


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_weights(index: int) -> Weights:
    seed = 100 * index
    return Weights(
        normal(seed, (Q_HEADS + 2 * KV_HEADS) * DIM, HIDDEN) * 0.1,
        normal(seed + 1, (Q_HEADS + 2 * KV_HEADS) * DIM) * 0.1,
        normal(seed + 2, HIDDEN, Q_HEADS * DIM) * 0.1,
        normal(seed + 3, 2 * INNER, HIDDEN) * 0.1,
        normal(seed + 4, HIDDEN, INNER) * 0.1,
        normal(seed + 5, 2, HIDDEN) * 0.1 + 1,
        normal(seed + 6, 2, DIM) * 0.1 + 1,
    )


WEIGHTS = [make_weights(index) for index in range(LAYERS)]
FINAL_NORM, HEAD = normal(7, HIDDEN) * 0.1 + 1, normal(8, VOCABULARY, HIDDEN) * 0.1
ANGLES = torch.arange(64).float()[:, None] * torch.linspace(0.01, 1, DIM // 2)
TABLES = RopeTables(ANGLES.cos(), ANGLES.sin())
WINDOWS = (None, 9, None)


class Model:
    """A small model on one context, with its own cache of two sequences."""

    def __init__(self, cpu: CpuKernels, group_size: int | None = None) -> None:
        self.cpu = cpu
        self.layers = [
            DecoderLayer(
                Projection(cpu.pack(w.qkv, group_size=group_size), w.qkv_bias),
                Projection(cpu.pack(w.output, group_size=group_size)),
                Projection(cpu.pack(w.gate_up, group_size=group_size)),
                Projection(cpu.pack(w.down, group_size=group_size)),
                w.norms[0],
                w.norms[1],
                PagedCache(
                    torch.zeros(32, KV_HEADS, DIM, BLOCK), torch.zeros(32, KV_HEADS, BLOCK, DIM)
                ),
                HeadNorms(w.head_norms[0], w.head_norms[1], 1e-5),
                window,
            )
            for w, window in zip(WEIGHTS, WINDOWS, strict=True)
        ]
        self.head = cpu.pack(HEAD, group_size=group_size)
        self.decoder = Decoder(cpu, SHAPE, self.layers, TABLES, FINAL_NORM, self.head)

    def step(self, chunks: list[tuple[int, int, int]], embedded: torch.Tensor) -> torch.Tensor:
        """Runs chunks (sequence, start, end) of `embedded` [2, LENGTH, HIDDEN]; all logits."""
        batch = batch_of(chunks)
        hidden = rows_of(chunks, embedded)
        every = np.arange(batch.token_count, dtype=np.int32)
        logits = torch.full((every.size, VOCABULARY), float("nan"))
        return self.decoder.forward(hidden, batch, every, logits)


def batch_of(chunks: list[tuple[int, int, int]]) -> StepBatch:
    positions = np.concatenate([np.arange(start, end) for _, start, end in chunks])
    sequences = np.concatenate([[which] * (end - start) for which, start, end in chunks])
    tables = np.arange(1, 21, dtype=np.int32).reshape(10, 2).T.copy()
    slots = tables[sequences, positions // BLOCK] * BLOCK + positions % BLOCK
    lengths = [end - start for _, start, end in chunks]
    return StepBatch(
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        np.array([end for _, _, end in chunks], dtype=np.int32),
        tables[[which for which, _, _ in chunks]],
        positions.astype(np.int32),
        slots.astype(np.int32),
        np.zeros_like(slots, dtype=np.int32),
    )


def rows_of(chunks: list[tuple[int, int, int]], embedded: torch.Tensor) -> torch.Tensor:
    return torch.cat([embedded[which, start:end] for which, start, end in chunks])


def composed(model: Model, batch: StepBatch, hidden: torch.Tensor) -> torch.Tensor:
    """The same step by single kernels."""
    cpu, tokens = model.cpu, batch.token_count
    added: torch.Tensor | None = None
    for layer in model.layers:
        normed = cpu.rms_norm(hidden, layer.input_norm, 1e-5, torch.empty_like(hidden), added=added)
        qkv = cpu.linear(
            normed,
            layer.qkv.weight,
            torch.empty(tokens, (Q_HEADS + 2 * KV_HEADS) * DIM),
            bias=layer.qkv.bias,
        )
        cpu.rope_write(qkv, TABLES, layer.cache, batch, norms=layer.head_norms)
        queries = qkv.view(tokens, Q_HEADS + 2 * KV_HEADS, DIM)[:, :Q_HEADS]
        attended = cpu.attention(
            queries,
            layer.cache,
            batch,
            torch.empty(tokens, Q_HEADS, DIM),
            scale=SHAPE.scale,
            window=layer.window,
        )
        added = cpu.linear(attended.view(tokens, -1), layer.output.weight, torch.empty_like(hidden))
        normed = cpu.rms_norm(hidden, layer.post_norm, 1e-5, torch.empty_like(hidden), added=added)
        gate_up = cpu.linear(normed, layer.gate_up.weight, torch.empty(tokens, 2 * INNER))
        active = cpu.silu_multiply(gate_up, torch.empty(tokens, INNER))
        added = cpu.linear(active, layer.down.weight, torch.empty_like(hidden))
    normed = cpu.rms_norm(hidden, FINAL_NORM, 1e-5, torch.empty_like(hidden), added=added)
    return cpu.linear(normed, model.head, torch.empty(tokens, VOCABULARY))


def exact(embedded: torch.Tensor) -> torch.Tensor:
    """Float64 logits of one whole sequence [LENGTH, HIDDEN]."""
    x = embedded.double()

    def norm(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    cos, sin = ANGLES[:LENGTH].double().cos()[:, None], ANGLES[:LENGTH].double().sin()[:, None]
    own, key = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)[None]
    for w, window in zip(WEIGHTS, WINDOWS, strict=True):
        fused = norm(x, w.norms[0]) @ w.qkv.double().T + w.qkv_bias.double()
        heads = fused.view(LENGTH, -1, DIM)
        q, k, v = heads.split([Q_HEADS, KV_HEADS, KV_HEADS], dim=1)
        rotated = []
        for part, weight in ((q, w.head_norms[0]), (k, w.head_norms[1])):
            low, high = norm(part, weight).chunk(2, dim=-1)
            rotated.append(torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1))
        keys, values = (each.repeat_interleave(Q_HEADS // KV_HEADS, 1) for each in (rotated[1], v))
        scores = torch.einsum("qhd,khd->hqk", rotated[0], keys) * SHAPE.scale
        hidden = (key > own) | (key <= own - (window or LENGTH))
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        attended = torch.einsum("hqk,khd->qhd", weights, values).reshape(LENGTH, -1)
        x = x + attended @ w.output.double().T
        gate, up = (norm(x, w.norms[1]) @ w.gate_up.double().T).chunk(2, dim=-1)
        x = x + (torch.nn.functional.silu(gate) * up) @ w.down.double().T
    return norm(x, FINAL_NORM) @ HEAD.double().T


def test_matches_float64(cpu: CpuKernels) -> None:
    embedded = normal(50, 2, LENGTH, HIDDEN)
    logits = Model(cpu).step([(0, 0, LENGTH), (1, 0, LENGTH)], embedded)
    for which in range(2):
        own = logits[which * LENGTH : (which + 1) * LENGTH].double()
        torch.testing.assert_close(own, exact(embedded[which]), rtol=0, atol=2e-5)


@pytest.mark.parametrize("group_size", [None, 32])
def test_equals_its_single_kernels(cpu: CpuKernels, group_size: int | None) -> None:
    embedded, chunks = normal(50, 2, LENGTH, HIDDEN), [(0, 0, 20), (1, 0, LENGTH)]
    fused = Model(cpu, group_size).step(chunks, embedded)
    single = composed(Model(cpu, group_size), batch_of(chunks), rows_of(chunks, embedded))
    assert torch.equal(fused, single)


@pytest.mark.parametrize("group_size", [None, 32])
def test_chunks_mates_and_threads_change_no_bit(
    cpu: CpuKernels, alone: CpuKernels, group_size: int | None
) -> None:
    embedded = normal(50, 2, LENGTH, HIDDEN)
    whole = Model(cpu, group_size).step([(0, 0, LENGTH)], embedded)
    for kernels, width in ((cpu, 1), (alone, 1), (cpu, 5), (alone, 16), (alone, LENGTH)):
        model, got = Model(kernels, group_size), []
        for start in range(0, LENGTH, width):
            end = min(start + width, LENGTH)
            mate = [(1, start, end)] if start % 2 else []
            got.append(model.step([*mate, (0, start, end)], embedded)[-(end - start) :])
        assert torch.equal(torch.cat(got), whole), width


def test_only_the_named_rows_get_logits(cpu: CpuKernels) -> None:
    embedded, chunks = normal(50, 2, LENGTH, HIDDEN), [(0, 0, 9), (1, 0, LENGTH)]
    every = Model(cpu).step(chunks, embedded)
    named = np.array([8, 8 + LENGTH], dtype=np.int32)
    model, batch = Model(cpu), batch_of(chunks)
    logits = model.decoder.forward(
        rows_of(chunks, embedded), batch, named, torch.empty(2, VOCABULARY)
    )
    assert torch.equal(logits, every[torch.from_numpy(named).long()])
    none = model.decoder.forward(
        rows_of(chunks, embedded), batch, named[:0], torch.empty(0, VOCABULARY)
    )
    assert none.shape == (0, VOCABULARY)
