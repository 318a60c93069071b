"""A decoder in torch, as its spec describes it, on any device and in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from worker_service.attention.interface import StepAttention
from worker_service.layers.adapters import AdaptedLinear, TorchAdapters
from worker_service.layers.linear import DenseLinear, Linear, make_linear
from worker_service.layers.mlp import GatedMlp
from worker_service.layers.norm import RmsNorm
from worker_service.layers.rope import RopeTable, build_table, rotate
from worker_service.layers.split import Embedding, GatheredLinear, SummedLinear
from worker_service.model.adapters import adapted_parts
from worker_service.model.loader import WeightLoader
from worker_service.model.share import DecoderShare
from worker_service.model.spec import (
    AttentionSpec,
    LayerSpec,
    NormSpec,
    ProjectionSpec,
)
from worker_service.model.traits import Trait
from worker_service.parallel.peers import Peers

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
    """Owns one rank's weights on one device: the whole model where there is but one."""

    def __init__(
        self,
        share: DecoderShare,
        loader: WeightLoader,
        max_length: int,
        data_type: torch.dtype,
        device: torch.device,
        progress: Callable[[str], None],
        peers: Peers | None = None,
        adapters: TorchAdapters | None = None,
    ) -> None:
        """The decoder has no other than SUPPORTED_TRAITS; `max_length` bounds positions. `peers`
        are there where `share` is not the whole. `adapters` add to the layers' projections."""
        self._peers = peers
        tensor_rank, tensor_size = share.coordinates.tensor
        self._tensor_peers = tensor_peers = peers if tensor_size > 1 else None
        self._hidden_size = share.hidden_size
        self._vocabulary_size = share.vocabulary[-1].stop
        self._data_type = data_type
        self._device = device
        self._embedding: Embedding | None = None
        if share.embedding is not None:
            weight = loader.tensor(share.embedding)
            self._embedding = Embedding(weight, share.vocabulary[tensor_rank], tensor_peers)
        layers = []
        for index, layer in enumerate(share.layers):
            layers.append(_Layer(index, layer, _Builder(loader, tensor_peers, adapters)))
            progress(f"layer {index + 1} of {len(share.layers)}")
        self._layers = tuple(layers)
        self._norm = None if share.final_norm is None else _norm(share.final_norm, loader)
        self._is_tied = share.is_tied
        self._head: Linear | None = None
        if share.head is not None:
            self._head = self._make_head(share, share.head, loader)
        rope = share.layers[0].attention.rope
        assert rope is not None
        self._angles = build_table(rope, max_length, data_type, device)

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and tables, packed copies included."""
        total = self._angles.byte_count + sum(layer.byte_count for layer in self._layers)
        if self._embedding is not None:
            total += self._embedding.weight.nbytes
        if self._norm is not None:
            total += self._norm.byte_count
        if self._head is not None and not (self._is_tied and _is_dense(self._head)):
            total += self._head.byte_count  # a dense tied one is the embedding's own memory
        return total

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
        the model's dtype; with S = 0 the head is not run. Only the answering rank of several gets
        logits: others return [0, vocabulary].
        """
        hidden = self._enter(token_ids)
        angles = self._angles.gather(positions)
        for layer in self._layers:
            hidden = layer(hidden, angles, attention)
        if self._norm is None or self._head is None:
            assert self._peers is not None
            self._peers.send(hidden)
            return hidden.new_empty((0, self._vocabulary_size))
        if not logit_indices.numel():
            return hidden.new_empty((0, self._vocabulary_size))
        return self._head(self._norm(hidden.index_select(0, logit_indices)))

    def _enter(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[T, hidden]: the tokens' embeddings, or what the stage before this one made of them."""
        if self._embedding is not None:
            return self._embedding(token_ids)
        assert self._peers is not None
        shape = (token_ids.shape[0], self._hidden_size)
        return self._peers.receive(torch.empty(shape, dtype=self._data_type, device=self._device))

    def _make_head(self, share: DecoderShare, spec: ProjectionSpec, loader: WeightLoader) -> Linear:
        if share.is_tied and self._embedding is not None:
            own = make_linear(self._embedding.weight, None, shared=True)
        else:
            own = _linear(spec, loader)
        if self._tensor_peers is None:
            return own
        widths = [len(tokens) for tokens in share.vocabulary]
        return GatheredLinear(own, widths, self._tensor_peers)


class _Layer:
    """One decoder layer."""

    def __init__(self, index: int, spec: LayerSpec, builder: _Builder) -> None:
        block, loader = spec.feed_forward, builder.loader
        assert spec.attention.pre_norm is not None and block.pre_norm is not None
        self._input_norm = _norm(spec.attention.pre_norm, loader)
        self._attention = _Attention(index, spec.attention, builder)
        self._mlp_norm = _norm(block.pre_norm, loader)
        self._mlp = GatedMlp(builder.linear(block.up), builder.summed(block.down))

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

    def __init__(self, index: int, spec: AttentionSpec, builder: _Builder) -> None:
        self._index = index
        self._head_count = spec.heads.head_count
        self._kv_head_count = spec.heads.kv_head_count
        self._head_dim = spec.heads.head_dim
        self._qkv = builder.linear(spec.qkv)
        self._output = builder.summed(spec.output)
        self._head_norms: tuple[RmsNorm, RmsNorm] | None = None
        if spec.head_norms is not None:
            query, key = spec.head_norms.query, spec.head_norms.key
            self._head_norms = (_norm(query, builder.loader), _norm(key, builder.loader))

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


@dataclass(frozen=True, slots=True, eq=False)
class _Builder:
    """Makes a layer's projections. `peers` share its heads and width with this rank."""

    loader: WeightLoader
    peers: Peers | None
    adapters: TorchAdapters | None

    def linear(self, spec: ProjectionSpec) -> Linear:
        own = _linear(spec, self.loader)
        if self.adapters is None:
            return own
        return AdaptedLinear(own, adapted_parts(spec), self.adapters)

    def summed(self, spec: ProjectionSpec) -> Linear:
        """A projection whose inputs are split over the ranks. An adapter adds to each term."""
        own = self.linear(spec)
        return own if self.peers is None else SummedLinear(own, self.peers)


def _is_dense(head: Linear) -> bool:
    own = head.own if isinstance(head, GatheredLinear) else head
    return isinstance(own, DenseLinear)


def _norm(spec: NormSpec, loader: WeightLoader) -> RmsNorm:
    return RmsNorm(loader.tensor(spec.weight), spec.epsilon)
