"""What a config.json says about a model of the Llama family, checked and typed.

Whatever would change the model's output and is not understood is refused, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from worker_service.domain.capability import DataType
from worker_service.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    Unscaled,
    YarnScaling,
)
from worker_service.load_errors import CheckpointInvalid, ModelUnsupported

_DEFAULT_THETA = 10000.0


class Architecture(Enum):
    """Architectures the registry can build, by their name in config.json."""

    LLAMA = "LlamaForCausalLM"
    MISTRAL = "MistralForCausalLM"
    QWEN2 = "Qwen2ForCausalLM"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of a decoder.

    `layer_windows`, one per layer: positions each token attends to, itself included, or None for
    all. `data_type` is the one the weights were published in, None when the file does not say.
    """

    architecture: Architecture
    vocabulary_size: int
    hidden_size: int
    intermediate_size: int
    layer_count: int
    head_count: int
    kv_head_count: int
    head_dim: int
    max_length: int
    norm_epsilon: float
    rope: Rope
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    layer_windows: tuple[int | None, ...]
    data_type: DataType | None


class _Reader:
    """Typed access to a JSON object; errors name the key."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._invalid(key, value, f"a whole number of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._invalid(key, value, "a number")
        if not math.isfinite(value) or value <= 0:
            raise self._invalid(key, value, "a finite number above 0")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._invalid(key, value, "true or false")
        return value

    def child(self, key: str) -> _Reader | None:
        value = self.values.get(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self._invalid(key, value, "an object")
        return _Reader(value, f"{self.prefix}{key}.")

    def _get(self, key: str, default: object) -> object:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise CheckpointInvalid(f"config.json lacks {self.prefix}{key}")
        return value

    def _invalid(self, key: str, value: object, wanted: str) -> CheckpointInvalid:
        return CheckpointInvalid(f"config.json: {self.prefix}{key} is {value!r}, must be {wanted}")


def parse_config(values: Mapping[str, Any]) -> ModelConfig:
    """Reads a config.json of transformers 4 or 5.

    Raises ModelUnsupported for what this worker cannot run, CheckpointInvalid for what no worker
    could.
    """
    architecture = _architecture(values)
    for key in ("quantization_config", "compression_config"):
        if values.get(key) is not None:
            method = values[key].get("quant_method") if isinstance(values[key], dict) else None
            raise ModelUnsupported(key, method or values[key], "weights that are not quantized")
    activation = values.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelUnsupported("hidden_act", activation, "silu")
    reader = _Reader(values)
    hidden_size = reader.integer("hidden_size")
    head_count = reader.integer("num_attention_heads")
    kv_head_count = reader.integer("num_key_value_heads", head_count)
    if head_count % kv_head_count:
        raise CheckpointInvalid(
            f"config.json: num_attention_heads {head_count} is not a multiple of "
            f"num_key_value_heads {kv_head_count}"
        )
    head_dim = reader.integer("head_dim", hidden_size // head_count)
    if head_dim % 2:
        raise ModelUnsupported("head_dim", head_dim, "even sizes")
    layer_count = reader.integer("num_hidden_layers")
    max_length = reader.integer("max_position_embeddings")
    attention_bias = reader.flag("attention_bias", False)
    is_qwen2 = architecture is Architecture.QWEN2
    return ModelConfig(
        architecture=architecture,
        vocabulary_size=reader.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.integer("intermediate_size"),
        layer_count=layer_count,
        head_count=head_count,
        kv_head_count=kv_head_count,
        head_dim=head_dim,
        max_length=max_length,
        norm_epsilon=reader.number("rms_norm_eps", 1e-6),
        rope=_rope(reader, head_dim, max_length),
        tied_embeddings=reader.flag("tie_word_embeddings", False),
        qkv_bias=True if is_qwen2 else attention_bias,
        output_bias=False if is_qwen2 else attention_bias,
        mlp_bias=reader.flag("mlp_bias", False),
        layer_windows=_layer_windows(reader, architecture, layer_count),
        data_type=_data_type(values),
    )


def _architecture(values: Mapping[str, Any]) -> Architecture:
    names = values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise CheckpointInvalid("config.json: architectures must name one architecture")
    try:
        return Architecture(names[0])
    except ValueError:
        supported = ", ".join(known.value for known in Architecture)
        raise ModelUnsupported("architecture", names[0], supported) from None


def _data_type(values: Mapping[str, Any]) -> DataType | None:
    name = values.get("dtype", values.get("torch_dtype"))
    if name is None:
        return None
    try:
        return DataType(name)
    except ValueError:
        supported = ", ".join(known.value for known in DataType)
        raise ModelUnsupported("dtype", name, supported) from None


def _layer_windows(
    reader: _Reader, architecture: Architecture, layer_count: int
) -> tuple[int | None, ...]:
    if architecture is Architecture.LLAMA:
        return (None,) * layer_count
    is_qwen2 = architecture is Architecture.QWEN2
    if is_qwen2 and not reader.flag("use_sliding_window", False):
        return (None,) * layer_count
    if reader.values.get("sliding_window") is None:
        return (None,) * layer_count
    window = reader.integer("sliding_window")
    kinds = reader.values.get("layer_types") if is_qwen2 else None
    if kinds is None:
        first = reader.integer("max_window_layers", 28, minimum=0) if is_qwen2 else 0
        return tuple(window if layer >= first else None for layer in range(layer_count))
    if not isinstance(kinds, list) or len(kinds) != layer_count:
        raise CheckpointInvalid(f"config.json: layer_types must name {layer_count} layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ModelUnsupported("layer_types", kind, "full_attention, sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _rope(reader: _Reader, head_dim: int, max_length: int) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before)."""
    scaling = reader.child("rope_scaling") or reader.child("rope_parameters") or _Reader({})
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise ModelUnsupported("rope_parameters", "one per kind of layer", "one for all layers")
    for holder in (reader, scaling):
        share = holder.values.get("partial_rotary_factor")
        if share is not None and share != 1:
            raise ModelUnsupported("partial_rotary_factor", share, "1")
    theta = scaling.number("rope_theta", reader.number("rope_theta", _DEFAULT_THETA))
    original_length = reader.integer(
        "original_max_position_embeddings",
        scaling.integer("original_max_position_embeddings", max_length),
    )
    return Rope(theta, head_dim, _rope_scaling(scaling, max_length, original_length))


def _rope_scaling(scaling: _Reader, max_length: int, original_length: int) -> RopeScaling:
    kind = scaling.values.get("rope_type", scaling.values.get("type", "default"))
    match kind:
        case "default":
            return Unscaled()
        case "linear":
            return LinearScaling(scaling.number("factor"))
        case "dynamic":
            return DynamicScaling(scaling.number("factor"), max_length)
        case "llama3":
            return Llama3Scaling(
                factor=scaling.number("factor"),
                low_frequency_factor=scaling.number("low_freq_factor"),
                high_frequency_factor=scaling.number("high_freq_factor"),
                original_length=original_length,
            )
        case "yarn":
            return _yarn_scaling(scaling, original_length)
        case _:
            raise ModelUnsupported(
                "rope_type", kind, "default, linear, dynamic, llama3, yarn"
            ) from None


def _yarn_scaling(scaling: _Reader, original_length: int) -> YarnScaling:
    factor = scaling.number("factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = magnitude(1.0)
    if scaling.values.get("attention_factor") is not None:
        attention_factor = scaling.number("attention_factor")
    elif scaling.values.get("mscale") and scaling.values.get("mscale_all_dim"):
        attention_factor = magnitude(scaling.number("mscale")) / magnitude(
            scaling.number("mscale_all_dim")
        )
    return YarnScaling(
        factor=factor,
        original_length=original_length,
        attention_factor=attention_factor,
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
    )
