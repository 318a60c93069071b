"""What Llama and its near relatives share: the tensors' names, and how they are put together.

A decoder with RMSNorm before each block, rotary positions, grouped-query attention and a gated
SiLU feed-forward block. Query, key and value are one projection, as are gate and up.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from worker_service.attention.interface import LayerAttention
from worker_service.load_errors import CheckpointInvalid, ModelUnsupported
from worker_service.model.config import ConfigReader
from worker_service.model.rope_config import read_rope
from worker_service.model.spec import (
    AttentionSpec,
    CopySpec,
    DecoderSpec,
    FeedForwardSpec,
    LayerSpec,
    NormSpec,
    ProjectionSpec,
    TensorSpec,
)

_DEFAULT_EPSILON = 1e-6
# What transformers takes where config.json does not name a window; null means none.
_DEFAULT_WINDOW = 4096


def describe_llama_like(
    reader: ConfigReader,
    architecture: str,
    *,
    qkv_bias: bool,
    output_bias: bool,
    window_of: Callable[[int], int | None],
) -> DecoderSpec:
    """The decoder that the config describes; `window_of` gives a layer's window by its index.

    Raises ModelUnsupported and CheckpointInvalid as Family.describe does.
    """
    activation = reader.values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelUnsupported("hidden_act", activation, "silu")
    hidden = reader.integer("hidden_size")
    vocabulary = reader.integer("vocab_size")
    max_length = reader.integer("max_position_embeddings")
    layers = range(reader.integer("num_hidden_layers"))
    heads = _heads(reader, hidden)
    rope = read_rope(reader, heads.head_dim, max_length)
    epsilon = reader.number("rms_norm_eps", _DEFAULT_EPSILON)
    feed_forward = _feed_forwards(reader, hidden, epsilon)
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
                window_of(index),
            ),
            qkv=projection(own, qkv_sizes, hidden, qkv_bias),
            output=projection(own, {"o_proj": hidden}, query_size, output_bias),
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
        max_length=max_length,
        data_type=reader.data_type(),
        embedding=embedding,
        layers=tuple(LayerSpec(attention(index), feed_forward(index)) for index in layers),
        final_norm=norm("model.norm", hidden, epsilon),
        head=None if tied else ProjectionSpec((head,)),
        copies=(CopySpec(head.name, embedding),) if tied else (),
        # Old checkpoints hold the wavelengths, which follow from the config.
        ignored=frozenset(
            [
                "model.rotary_emb.inv_freq",
                *(f"model.layers.{index}.self_attn.rotary_emb.inv_freq" for index in layers),
            ]
        ),
    )


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
    if reader.has("sliding_window") and reader.values["sliding_window"] is None:
        return None
    return reader.integer("sliding_window", _DEFAULT_WINDOW)


def _heads(reader: ConfigReader, hidden: int) -> LayerAttention:
    head_count = reader.integer("num_attention_heads")
    kv_head_count = reader.integer("num_key_value_heads", head_count)
    if head_count % kv_head_count:
        raise CheckpointInvalid(
            f"config.json: num_attention_heads {head_count} is not a multiple of "
            f"num_key_value_heads {kv_head_count}"
        )
    head_dim = reader.integer("head_dim", hidden // head_count)
    return LayerAttention(head_count, kv_head_count, head_dim, 1.0 / math.sqrt(head_dim))


def _feed_forwards(
    reader: ConfigReader, hidden: int, epsilon: float
) -> Callable[[int], FeedForwardSpec]:
    """The feed-forward block of a layer by its index."""
    intermediate = reader.integer("intermediate_size")
    bias = reader.flag("mlp_bias", False)

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
