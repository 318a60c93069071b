"""What Llama and its near relatives share: the tensors' names, and how they are put together.

A decoder with RMSNorm before each block, rotary positions, grouped-query attention and a gated
SiLU feed-forward block. Query, key and value are one projection, as are gate and up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from worker_service.attention.interface import LayerAttention
from worker_service.load_errors import CheckpointInvalid, ModelUnsupported
from worker_service.model.config import ConfigReader
from worker_service.model.rope_config import reached_length, read_rope
from worker_service.model.spec import (
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
    ProjectionSpec,
    TensorSpec,
)

FULL, WINDOWED = "full_attention", "sliding_attention"

_MOST_LAYERS = 10_000
_DEFAULT_EPSILON = 1e-6
# What transformers takes where config.json does not name a window; null means none.
_DEFAULT_WINDOW = 4096
# Buffers that old checkpoints hold. They follow from the config, and nobody reads them.
_BUFFERS = ("inv_freq", "cos_cached", "sin_cached")


@dataclass(frozen=True, slots=True)
class Variant:
    """How a family differs from its relatives.

    `max_length` and `kv_head_count` stand for keys that config.json lacks, as transformers has
    them; a `kv_head_count` of None is the number of query heads. `window_of` gives a layer's window
    by its index.
    """

    max_length: int
    kv_head_count: int | None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    window_of: Callable[[int], int | None] = lambda _: None


def describe_llama_like(reader: ConfigReader, architecture: str, variant: Variant) -> DecoderSpec:
    """The decoder that the config describes.

    Raises ModelUnsupported and CheckpointInvalid as Family.describe does.
    """
    activation = reader.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelUnsupported("hidden_act", activation, "silu")
    hidden = reader.integer("hidden_size")
    vocabulary = reader.integer("vocab_size")
    reader.token_ids("eos_token_id", vocabulary)  # the control plane reads them
    max_length = reader.integer("max_position_embeddings", variant.max_length)
    layers = range(_layer_count(reader))
    heads = _heads(reader, hidden, variant)
    rope = read_rope(reader, heads.head_dim, max_length)
    epsilon = reader.number("rms_norm_eps", _DEFAULT_EPSILON)
    feed_forward = _feed_forwards(reader, hidden, epsilon, variant.mlp_bias)
    query_size, kv_size = heads.head_count * heads.head_dim, heads.kv_head_count * heads.head_dim
    qkv_sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}

    def attention(index: int) -> AttentionSpec:
        prefix = f"model.layers.{index}"
        own = f"{prefix}.self_attn"
        return AttentionSpec(
            heads=LayerAttention(
                heads.head_count,
                heads.kv_head_count,
                heads.head_dim,
                heads.scale,
                variant.window_of(index),
            ),
            qkv=projection(own, qkv_sizes, hidden, variant.qkv_bias),
            output=projection(own, {"o_proj": hidden}, query_size, variant.output_bias),
            rope=rope,
            pre_norm=norm(f"{prefix}.input_layernorm", hidden, epsilon),
        )

    embedding = TensorSpec("model.embed_tokens.weight", (vocabulary, hidden))
    tied = reader.flag("tie_word_embeddings", False)
    head = TensorSpec("lm_head.weight", (vocabulary, hidden))
    return DecoderSpec(
        architecture=architecture,
        vocabulary_size=vocabulary,
        hidden_size=hidden,
        max_length=reached_length(rope, max_length),
        data_type=reader.data_type(),
        embedding=embedding,
        layers=tuple(LayerSpec(attention(index), feed_forward(index)) for index in layers),
        final_norm=norm("model.norm", hidden, epsilon),
        head=None if tied else ProjectionSpec((head,)),
        tied_head=head.name if tied else None,
        ignored=frozenset(_buffers(layers)),
    )


def _buffers(layers: range) -> Iterator[str]:
    for index in layers:
        yield f"model.layers.{index}.self_attn.masked_bias"
    for owner in ("model", *(f"model.layers.{index}.self_attn" for index in layers)):
        yield from (f"{owner}.rotary_emb.{name}" for name in _BUFFERS)


def projection(prefix: str, outputs: dict[str, int], inputs: int, bias: bool) -> ProjectionSpec:
    """The stack of the modules `outputs`, with their row counts, under `prefix`."""
    return ProjectionSpec(
        tuple(
            TensorSpec(f"{prefix}.{name}.weight", (rows, inputs)) for name, rows in outputs.items()
        ),
        tuple(TensorSpec(f"{prefix}.{name}.bias", (rows,)) for name, rows in outputs.items())
        if bias
        else (),
    )


def norm(name: str, size: int, epsilon: float) -> NormSpec:
    """The RMSNorm of the module `name`."""
    return NormSpec(TensorSpec(f"{name}.weight", (size,)), epsilon)


def sliding_window(reader: ConfigReader) -> int | None:
    """The positions that a windowed layer attends to; None where the config says null."""
    return reader.integer_or_none("sliding_window", _DEFAULT_WINDOW)


def layer_kinds(reader: ConfigReader) -> tuple[str, ...] | None:
    """FULL or WINDOWED for each layer, or None where the config does not say."""
    kinds, count = reader.words("layer_types"), _layer_count(reader)
    if kinds is not None and len(kinds) != count:
        raise reader.invalid("layer_types", f"one kind for each of {count} layers")
    for kind in kinds or ():
        if kind not in (FULL, WINDOWED):
            raise ModelUnsupported("layer_types", kind, f"{FULL}, {WINDOWED}")
    return kinds


def refuse_kinds(kinds: tuple[str, ...] | None, only: str) -> None:
    """Raises ModelUnsupported where a layer is of another kind than `only`."""
    for kind in kinds or ():
        if kind != only:
            raise ModelUnsupported("layer_types", kind, only)


def refuse_flag(reader: ConfigReader, key: str) -> None:
    """Raises ModelUnsupported where the config turns on what the family does not have."""
    if reader.flag(key, False):
        raise ModelUnsupported(key, True, "false")


def _layer_count(reader: ConfigReader) -> int:
    return reader.integer("num_hidden_layers", maximum=_MOST_LAYERS)


def _heads(reader: ConfigReader, hidden: int, variant: Variant) -> LayerAttention:
    head_count = reader.integer("num_attention_heads")
    kv_head_count = reader.integer_or_none("num_key_value_heads", variant.kv_head_count)
    if kv_head_count is None:
        kv_head_count = head_count
    if head_count % kv_head_count:
        raise CheckpointInvalid(
            f"config.json: num_attention_heads {head_count} is not a multiple of "
            f"num_key_value_heads {kv_head_count}"
        )
    head_dim = reader.integer_or_none("head_dim")
    if head_dim is None:
        if hidden % head_count:
            raise CheckpointInvalid(
                f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads "
                f"{head_count}, and head_dim is not there"
            )
        head_dim = hidden // head_count
    return LayerAttention(head_count, kv_head_count, head_dim, 1.0 / math.sqrt(head_dim))


def _feed_forwards(
    reader: ConfigReader, hidden: int, epsilon: float, bias: bool
) -> Callable[[int], FeedForwardSpec]:
    """The feed-forward block of a layer by its index."""
    intermediate = reader.integer("intermediate_size")

    def feed_forward(index: int) -> FeedForwardSpec:
        prefix = f"model.layers.{index}"
        up = {"gate_proj": intermediate, "up_proj": intermediate}
        return FeedForwardSpec(
            intermediate_size=intermediate,
            up=projection(f"{prefix}.mlp", up, hidden, bias),
            down=projection(f"{prefix}.mlp", {"down_proj": hidden}, intermediate, bias),
            pre_norm=norm(f"{prefix}.post_attention_layernorm", hidden, epsilon),
        )

    return feed_forward
