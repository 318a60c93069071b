"""What a decoder is: its layers, their constants, and the checkpoint's tensors they are made of.

A family (families/) turns a config.json into a DecoderSpec. The loader takes the tensors that the
spec names, and an executor runs what it describes. A spec can say more than any executor does:
traits.py lists what is special in a spec, and an executor refuses the traits that it lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum

from worker_service.attention.interface import LayerAttention
from worker_service.domain.capability import DataType
from worker_service.layers.rope_scaling import Rope


@dataclass(frozen=True, slots=True)
class Cut:
    """Where a part of a tensor is: along `axis`, which has `size` in all, from `start` on."""

    axis: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of the checkpoint, and the shape it must have; with a `cut`, a part of one and the
    part's own shape (see share.py)."""

    name: str
    shape: tuple[int, ...]
    cut: Cut | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the whole tensor."""
        if self.cut is None:
            return self.shape
        axis = self.cut.axis
        return (*self.shape[:axis], self.cut.size, *self.shape[axis + 1 :])


@dataclass(frozen=True, slots=True)
class ProjectionSpec:
    """y = x Wᵀ + b. W is `weights` [rows, inputs] one below the other, b is `biases` [rows] in the
    same order. Without biases b is 0."""

    weights: tuple[TensorSpec, ...]
    biases: tuple[TensorSpec, ...] = ()

    @property
    def output_count(self) -> int:
        return sum(weight.shape[0] for weight in self.weights)

    @property
    def input_count(self) -> int:
        return self.weights[0].shape[1]


class NormKind(Enum):
    """How a norm scales its input."""

    RMS = "RMSNorm"
    LAYER = "LayerNorm"


@dataclass(frozen=True, slots=True)
class NormSpec:
    """x normalised, times (`weight` + `weight_offset`), plus `bias` if there is one."""

    weight: TensorSpec
    epsilon: float
    kind: NormKind = NormKind.RMS
    bias: TensorSpec | None = None
    weight_offset: float = 0.0


@dataclass(frozen=True, slots=True)
class HeadNormsSpec:
    """Norms [head_dim] that each query head and each key head passes before the rotation."""

    query: NormSpec
    key: NormSpec


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal attention with grouped heads.

    `qkv` yields the query heads, then the key heads, then the value heads. `pre_norm` is applied
    to the block's input, `post_norm` to its output before the residual sum. `rope` None: positions
    are not encoded. `score_cap` c: a score s becomes c · tanh(s / c).
    """

    heads: LayerAttention
    qkv: ProjectionSpec
    output: ProjectionSpec
    rope: Rope | None
    pre_norm: NormSpec | None
    post_norm: NormSpec | None = None
    head_norms: HeadNormsSpec | None = None
    score_cap: float | None = None


class Activation(Enum):
    """The nonlinearity of a feed-forward block."""

    SILU = "SiLU"
    GELU = "GELU"
    GELU_TANH = "GELU by tanh"


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """A mixture of `count` feed-forward blocks, of which each token takes `chosen_count`, besides
    `shared_count` that every token takes. No executor runs one yet, so no tensors are named."""

    count: int
    chosen_count: int
    shared_count: int = 0


@dataclass(frozen=True, slots=True)
class FeedForwardSpec:
    """down(activation(gate(x)) · up(x)); without a gate down(activation(up(x))).

    `up` yields the gate first where there is one. Norms as in AttentionSpec.
    """

    intermediate_size: int
    up: ProjectionSpec
    down: ProjectionSpec
    pre_norm: NormSpec | None
    post_norm: NormSpec | None = None
    activation: Activation = Activation.SILU
    gated: bool = True
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """Attention, then the feed-forward block; each adds its output times `residual_scale` to the
    residual stream. `parallel`: both read the layer's input instead."""

    attention: AttentionSpec
    feed_forward: FeedForwardSpec
    residual_scale: float = 1.0
    parallel: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A whole decoder, from token ids to logits.

    `max_length`: the positions it was made for. `data_type`: the format that the weights were
    published in, None where config.json does not say. `embedding` [vocabulary, hidden], its rows
    multiplied by `embedding_scale`. `head` None: the embedding is the head, too, and
    `tied_head` the name under which a checkpoint may hold the head as well. Logits are multiplied
    by `logit_scale`, then capped by `logit_cap` as scores are by AttentionSpec.score_cap.
    `ignored`: names of tensors that a checkpoint may hold and nobody needs.
    """

    architecture: str
    vocabulary_size: int
    hidden_size: int
    max_length: int
    data_type: DataType | None
    embedding: TensorSpec
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec
    head: ProjectionSpec | None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    tied_head: str | None = None
    ignored: frozenset[str] = frozenset()

    def tensors(self) -> frozenset[TensorSpec]:
        """Every tensor that the decoder is made of."""
        return frozenset(tensors_in(self))


def tensors_in(value: object) -> Iterator[TensorSpec]:
    """Every tensor in a part of a spec, which may be a tuple of parts."""
    if isinstance(value, TensorSpec):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
