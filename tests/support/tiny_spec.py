"""Specs of small decoders, and folders with random weights that fit them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from worker_service.model.registry import describe
from worker_service.model.spec import (
    AttentionSpec,
    DecoderSpec,
    FeedForwardSpec,
    HeadNormsSpec,
    LayerSpec,
    NormSpec,
    TensorSpec,
)

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
}
"""A plain Llama of two layers with two heads of eight over one KV head."""


def tiny_spec(**config_changes: Any) -> DecoderSpec:
    """The decoder of TINY_CONFIG with changes."""
    return describe({**TINY_CONFIG, **config_changes})


def with_layers(spec: DecoderSpec, change: Callable[[int, LayerSpec], LayerSpec]) -> DecoderSpec:
    """The spec with each layer changed by its index."""
    layers = tuple(change(index, layer) for index, layer in enumerate(spec.layers))
    return replace(spec, layers=layers)


def with_attention(
    spec: DecoderSpec, change: Callable[[int, AttentionSpec], AttentionSpec]
) -> DecoderSpec:
    return with_layers(
        spec, lambda index, layer: replace(layer, attention=change(index, layer.attention))
    )


def with_feed_forward(
    spec: DecoderSpec, change: Callable[[int, FeedForwardSpec], FeedForwardSpec]
) -> DecoderSpec:
    return with_layers(
        spec, lambda index, layer: replace(layer, feed_forward=change(index, layer.feed_forward))
    )


def with_head_norms(spec: DecoderSpec) -> DecoderSpec:
    """As Qwen3 has them."""

    def norm(index: int, attention: AttentionSpec, name: str) -> NormSpec:
        tensor = f"model.layers.{index}.self_attn.{name}.weight"
        return NormSpec(TensorSpec(tensor, (attention.heads.head_dim,)), spec.final_norm.epsilon)

    return with_attention(
        spec,
        lambda index, attention: replace(
            attention,
            head_norms=HeadNormsSpec(
                norm(index, attention, "q_norm"), norm(index, attention, "k_norm")
            ),
        ),
    )


def save_random(spec: DecoderSpec, folder: Path) -> Path:
    """A model folder with every tensor of the spec, its config.json empty."""
    generator = torch.Generator().manual_seed(7)
    tensors = {
        tensor.name: 0.2 * torch.randn(tensor.shape, generator=generator)
        for tensor in sorted(spec.tensors(), key=lambda tensor: tensor.name)
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    return folder
