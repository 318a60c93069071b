"""A decoder in torch, as its spec describes it, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

from worker_service.attention.interface import StepAttention
from worker_service.layers.linear import DenseLinear, Linear, make_linear
from worker_service.layers.mlp import GatedMlp
from worker_service.layers.norm import RmsNorm
from worker_service.layers.rope import RopeTable, build_table, rotate
from worker_service.model.loader import WeightLoader
from worker_service.model.spec import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    NormSpec,
    ProjectionSpec,
)
from worker_service.model.traits import Trait

SUPPORTED_TRAITS = frozenset(
    {
        Trait.WINDOWS,
        Trait.HEAD_NORMS,
        Trait.PARTIAL_ROPE,
        Trait.MIXED_HEADS,
        Trait.MIXED_WIDTHS,
        Trait.MIXED_EPSILON,
    }
)


class TorchDecoder:
    """Owns a model's weights on one device."""

    def __init__(
        self,
        spec: DecoderSpec,
        loader: WeightLoader,
        max_length: int,
        data_type: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None],
    ) -> None:
        """`spec` has no other than SUPPORTED_TRAITS; `max_length` bounds positions."""
        self._vocabulary_size = spec.vocabulary_size
        self._embedding = loader.tensor(spec.embedding)
        layers = []
        for index, layer in enumerate(spec.layers):
            layers.append(_Layer(index, layer, loader))
            progress(f"layer {index + 1} of {len(spec.layers)}")
        self._layers = tuple(layers)
        self._norm = _norm(spec.final_norm, loader)
        self._head: Linear
        self._is_tied = spec.head is None
        if spec.head is None:
            self._head = make_linear(self._embedding, None, shared=True)
        else:
            self._head = _linear(spec.head, loader)
        rope = spec.layers[0].attention.rope
        assert rope is not None
        self._angles = build_table(rope, max_length, data_type, device)

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and tables, packed copies included."""
        total = self._embedding.nbytes + self._norm.byte_count + self._angles.byte_count
        total += sum(layer.byte_count for layer in self._layers)
        if self._is_tied and isinstance(self._head, DenseLinear):
            return total  # the head is the embedding's own memory
        return total + self._head.byte_count

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Runs one step of T tokens: writes their KV and returns logits.

        `token_ids`, `positions` int64 [T], positions counted within each sequence;
        `logit_indices` int64 [S], the tokens whose logits are wanted. Returns [S, vocabulary] in
        the model's dtype; with S = 0 the head is not run.
        """
        hidden = self._embedding.index_select(0, token_ids)
        angles = self._angles.gather(positions)
        for layer in self._layers:
            hidden = layer(hidden, angles, attention)
        if not logit_indices.numel():
            return hidden.new_empty((0, self._vocabulary_size))
        return self._head(self._norm(hidden.index_select(0, logit_indices)))


class _Layer:
    """One decoder layer."""

    def __init__(self, index: int, spec: LayerSpec, loader: WeightLoader) -> None:
        block = spec.feed_forward
        assert spec.attention.pre_norm is not None and block.pre_norm is not None
        self._input_norm = _norm(spec.attention.pre_norm, loader)
        self._attention = _Attention(index, spec.attention, loader)
        self._mlp_norm = _norm(block.pre_norm, loader)
        self._mlp = GatedMlp(_linear(block.up, loader), _linear(block.down, loader))

    @property
    def byte_count(self) -> int:
        parts = (self._input_norm, self._attention, self._mlp_norm, self._mlp)
        return sum(part.byte_count for part in parts)

    def __call__(
        self, hidden: torch.Tensor, angles: RopeTable, attention: StepAttention
    ) -> torch.Tensor:
        """Adds the layer's two blocks to hidden [T, hidden], in place."""
        hidden += self._attention(self._input_norm(hidden), angles, attention)
        hidden += self._mlp(self._mlp_norm(hidden))
        return hidden


class _Attention:
    """The projections around a layer's attention, the heads' norms and the rotation."""

    def __init__(self, index: int, spec: AttentionSpec, loader: WeightLoader) -> None:
        self._index = index
        self._head_count = spec.heads.head_count
        self._kv_head_count = spec.heads.kv_head_count
        self._head_dim = spec.heads.head_dim
        self._qkv = _linear(spec.qkv, loader)
        self._output = _linear(spec.output, loader)
        self._head_norms: tuple[RmsNorm, RmsNorm] | None = None
        if spec.head_norms is not None:
            query, key = spec.head_norms.query, spec.head_norms.key
            self._head_norms = (_norm(query, loader), _norm(key, loader))

    @property
    def byte_count(self) -> int:
        parts = (self._qkv, self._output, *(self._head_norms or ()))
        return sum(part.byte_count for part in parts)

    def __call__(
        self, x: torch.Tensor, angles: RopeTable, attention: StepAttention
    ) -> torch.Tensor:
        """x [T, hidden] → a new tensor of the same shape; writes the step's KV."""
        heads = self._qkv(x).view(x.shape[0], -1, self._head_dim)
        rotated_count = self._head_count + self._kv_head_count
        rotated = rotate(self._normed(heads[:, :rotated_count]), angles)
        attention.write_kv(self._index, rotated[:, self._head_count :], heads[:, rotated_count:])
        attended = attention.forward(self._index, rotated[:, : self._head_count])
        return self._output(attended.flatten(1))

    def _normed(self, heads: torch.Tensor) -> torch.Tensor:
        """Query and key heads [T, heads, head_dim], past their norms if they have any."""
        if self._head_norms is None:
            return heads
        query_norm, key_norm = self._head_norms
        queries, keys = heads[:, : self._head_count], heads[:, self._head_count :]
        return torch.cat([query_norm(queries), key_norm(keys)], dim=1)


def _linear(spec: ProjectionSpec, loader: WeightLoader) -> Linear:
    weight, bias = loader.projection(spec)
    return make_linear(weight, bias, shared=False)


def _norm(spec: NormSpec, loader: WeightLoader) -> RmsNorm:
    return RmsNorm(loader.tensor(spec.weight), spec.epsilon)
