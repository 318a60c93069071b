"""A whole decoder as one call per step.

The layers' pointers are laid out once. A step passes the batch, the hidden rows and where the
logits go. The single kernels serve where something stands between the layers (adapters, tensor
parallel sums): their arithmetic is the same, to the bit.
"""

from __future__ import annotations

from ctypes import pointer
from dataclasses import dataclass

import numpy as np
import torch

from worker_service.domain.batch import StepBatch
from worker_service.domain.columns import IntColumn
from worker_service.kernels.cpu import library
from worker_service.kernels.cpu.ops import (
    MAX_HEAD_DIM,
    CpuKernels,
    HeadNorms,
    PackedWeight,
    PagedCache,
    RopeTables,
    address,
    describe,
)


@dataclass(frozen=True, slots=True, eq=False)
class Projection:
    """A packed weight and its bias, if it has one."""

    weight: PackedWeight
    bias: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One block: norm, attention, norm, gated SiLU feed-forward, each with a residual.

    `qkv` [(q_heads + 2 kv_heads) head_dim, hidden]; `gate_up` [2 intermediate, hidden], gates
    first; norms are weights [hidden]; `window`: positions attended to, None for all.
    """

    qkv: Projection
    output: Projection
    gate_up: Projection
    down: Projection
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    cache: PagedCache
    head_norms: HeadNorms | None = None
    window: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderShape:
    """What all layers share. `scale` multiplies the scores."""

    hidden: int
    intermediate: int
    q_heads: int
    epsilon: float
    scale: float


class Decoder:
    """Runs all layers, the final norm and the head. Keeps every tensor it points into alive."""

    def __init__(
        self,
        kernels: CpuKernels,
        shape: DecoderShape,
        layers: list[DecoderLayer],
        tables: RopeTables,
        final_norm: torch.Tensor,
        head: PackedWeight,
    ) -> None:
        assert layers
        self._kernels = kernels
        self._owned = (layers, tables, final_norm, head)
        self._hidden, self._vocabulary = shape.hidden, head.out_features
        first = layers[0].cache.descriptor()
        assert first.head_dim % kernels.context.head_dim_multiple == 0
        assert first.head_dim <= MAX_HEAD_DIM and shape.q_heads % first.kv_heads == 0
        assert tables.rotary_dim <= first.head_dim and final_norm.shape == (shape.hidden,)
        assert head.in_features == shape.hidden
        self._layers = (library.Layer * len(layers))(
            *(_describe(layer, shape, first) for layer in layers)
        )
        self._model = library.Model(
            self._layers,
            len(layers),
            shape.hidden,
            shape.intermediate,
            shape.q_heads,
            first.kv_heads,
            first.head_dim,
            tables.rotary_dim,
            first.block_size,
            first.kind,
            shape.epsilon,
            shape.scale,
            address(tables.cosines),
            address(tables.sines),
            address(final_norm),
            head.descriptor(),
        )

    def forward(
        self,
        hidden: torch.Tensor,
        batch: StepBatch,
        logit_indices: IntColumn,
        logits: torch.Tensor,
        adapters: library.Adapters | None = None,
    ) -> torch.Tensor:
        """`hidden` [T, hidden], the embedded tokens, is consumed; writes `logits` [S, vocabulary]
        of the tokens at `logit_indices` int32 [S], and K and V to the batch's slots. `adapters`
        are those of the step's tokens."""
        count = int(logit_indices.size)
        assert hidden.shape == (batch.token_count, self._hidden)
        assert logits.shape == (count, self._vocabulary)
        assert logit_indices.dtype == np.int32 and logit_indices.flags.c_contiguous
        self._kernels.context.run(
            library.DecodeCall(
                model=pointer(self._model),
                batch=pointer(describe(batch)),
                hidden=address(hidden),
                logit_indices=logit_indices.ctypes.data,
                logit_count=count,
                logits=address(logits) if count else None,
                adapters=None if adapters is None else pointer(adapters),
            )
        )
        return logits


def _describe(layer: DecoderLayer, shape: DecoderShape, first: library.Cache) -> library.Layer:
    cache, norms = layer.cache.descriptor(), layer.head_norms
    geometry = (cache.block_size, cache.kv_heads, cache.head_dim, cache.kind)
    assert geometry == (first.block_size, first.kv_heads, first.head_dim, first.kind)
    q_width = shape.q_heads * cache.head_dim
    widths = {
        layer.qkv: (q_width + 2 * cache.kv_heads * cache.head_dim, shape.hidden),
        layer.output: (shape.hidden, q_width),
        layer.gate_up: (2 * shape.intermediate, shape.hidden),
        layer.down: (shape.hidden, shape.intermediate),
    }
    for projection, (outputs, inputs) in widths.items():
        weight, bias = projection.weight, projection.bias
        assert (weight.out_features, weight.in_features) == (outputs, inputs)
        assert bias is None or bias.shape == (outputs,)
    assert layer.input_norm.shape == layer.post_norm.shape == (shape.hidden,)
    assert norms is None or norms.epsilon == shape.epsilon
    return library.Layer(
        layer.qkv.weight.descriptor(),
        layer.output.weight.descriptor(),
        layer.gate_up.weight.descriptor(),
        layer.down.weight.descriptor(),
        address(layer.qkv.bias),
        address(layer.output.bias),
        address(layer.gate_up.bias),
        address(layer.down.bias),
        address(layer.input_norm),
        address(layer.post_norm),
        address(norms.query if norms else None),
        address(norms.key if norms else None),
        cache.keys,
        cache.values,
        layer.window or 0,
    )
