"""What is special in a decoder: the reasons for which an executor may refuse it.

The plainest decoder has none: layers of one shape, RMSNorm before each block, all of each head
rotated by one table, every position attended to, and a gated SiLU feed-forward block. An executor
names the traits that it runs and refuses all others, so one that is new here is refused everywhere
until an executor learns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import Enum

from worker_service.model.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    NormKind,
    NormSpec,
)


class Trait(Enum):
    """The value completes the sentence "the model has …"."""

    WINDOWS = "attention windows"
    HEAD_NORMS = "norms of query and key heads"
    SCORE_CAP = "capped attention scores"
    MIXED_HEADS = "layers with different heads"
    MIXED_WIDTHS = "layers with feed-forward blocks of different sizes"
    NO_ROPE = "layers without rotary positions"
    PARTIAL_ROPE = "heads that are rotated in part"
    MIXED_ROPE = "layers with different rotary positions"
    LAYER_NORM = "LayerNorm"
    NORM_OFFSET = "norm weights with an offset"
    NORM_BIAS = "norms with a bias"
    MIXED_EPSILON = "norms with different epsilons"
    NO_PRE_NORM = "blocks without a norm before them"
    POST_NORM = "norms after a block"
    GELU = "GELU"
    GELU_TANH = "GELU by tanh"
    UNGATED = "feed-forward blocks without a gate"
    EXPERTS = "a mixture of experts"
    PARALLEL_BLOCKS = "attention and feed-forward blocks side by side"
    RESIDUAL_SCALE = "a residual scale"
    EMBEDDING_SCALE = "an embedding scale"
    LOGIT_SCALE = "a logit scale"
    LOGIT_CAP = "capped logits"
    HEAD_BIAS = "a bias of the head"


def traits_of(spec: DecoderSpec) -> frozenset[Trait]:
    """Everything special in the decoder."""
    return frozenset(_traits(spec))


def refusal(spec: DecoderSpec, supported: Iterable[Trait]) -> str | None:
    """Why an executor that runs only the `supported` traits cannot run the decoder, else None."""
    found = traits_of(spec).difference(supported)
    if not found:
        return None
    return f"the model has {', '.join(trait.value for trait in Trait if trait in found)}"


def _traits(spec: DecoderSpec) -> Iterator[Trait]:
    if spec.embedding_scale != 1.0:
        yield Trait.EMBEDDING_SCALE
    if spec.logit_scale != 1.0:
        yield Trait.LOGIT_SCALE
    if spec.logit_cap is not None:
        yield Trait.LOGIT_CAP
    if spec.head is not None and spec.head.biases:
        yield Trait.HEAD_BIAS
    for layer in spec.layers:
        yield from _layer_traits(layer)
    yield from _norm_traits([spec.final_norm, *_norms(spec.layers)])
    yield from _differences(spec.layers)


def _layer_traits(layer: LayerSpec) -> Iterator[Trait]:
    if layer.parallel:
        yield Trait.PARALLEL_BLOCKS
    if layer.residual_scale != 1.0:
        yield Trait.RESIDUAL_SCALE
    for block in (layer.attention, layer.feed_forward):
        if block.pre_norm is None:
            yield Trait.NO_PRE_NORM
        if block.post_norm is not None:
            yield Trait.POST_NORM
    yield from _attention_traits(layer.attention)
    yield from _feed_forward_traits(layer.feed_forward)


def _attention_traits(attention: AttentionSpec) -> Iterator[Trait]:
    if attention.heads.window is not None:
        yield Trait.WINDOWS
    if attention.head_norms is not None:
        yield Trait.HEAD_NORMS
    if attention.score_cap is not None:
        yield Trait.SCORE_CAP
    if attention.rope is None:
        yield Trait.NO_ROPE
    elif attention.rope.rotary_dim != attention.heads.head_dim:
        yield Trait.PARTIAL_ROPE


def _feed_forward_traits(block: FeedForwardSpec) -> Iterator[Trait]:
    match block.activation:
        case Activation.SILU:
            pass
        case Activation.GELU:
            yield Trait.GELU
        case Activation.GELU_TANH:
            yield Trait.GELU_TANH
    if not block.gated:
        yield Trait.UNGATED
    if block.experts is not None:
        yield Trait.EXPERTS


def _norms(layers: Iterable[LayerSpec]) -> Iterator[NormSpec]:
    for layer in layers:
        for block in (layer.attention, layer.feed_forward):
            yield from filter(None, (block.pre_norm, block.post_norm))
        if layer.attention.head_norms is not None:
            yield from (layer.attention.head_norms.query, layer.attention.head_norms.key)


def _norm_traits(norms: list[NormSpec]) -> Iterator[Trait]:
    if any(norm.kind is NormKind.LAYER for norm in norms):
        yield Trait.LAYER_NORM
    if any(norm.weight_offset != 0.0 for norm in norms):
        yield Trait.NORM_OFFSET
    if any(norm.bias is not None for norm in norms):
        yield Trait.NORM_BIAS
    if len({norm.epsilon for norm in norms}) > 1:
        yield Trait.MIXED_EPSILON


def _differences(layers: tuple[LayerSpec, ...]) -> Iterator[Trait]:
    heads = [layer.attention.heads for layer in layers]
    shapes = {(each.head_count, each.kv_head_count, each.head_dim, each.scale) for each in heads}
    if len(shapes) > 1:
        yield Trait.MIXED_HEADS
    if len({layer.feed_forward.intermediate_size for layer in layers}) > 1:
        yield Trait.MIXED_WIDTHS
    if len({layer.attention.rope for layer in layers}) > 1:
        yield Trait.MIXED_ROPE
