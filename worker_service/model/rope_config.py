"""What a config.json says about rotary positions, in the words of transformers 4 and 5."""

from __future__ import annotations

import math

from worker_service.layers.rope import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    Unscaled,
    YarnScaling,
)
from worker_service.load_errors import ModelUnsupported
from worker_service.model.config import ConfigReader

_DEFAULT_THETA = 10000.0


def read_rope(reader: ConfigReader, head_dim: int, max_length: int) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    One kind for all layers, over whole heads. Raises ModelUnsupported for any other,
    CheckpointInvalid for what makes no sense.
    """
    if head_dim % 2:
        raise ModelUnsupported("head_dim", head_dim, "even sizes")
    scaling = reader.child("rope_scaling") or reader.child("rope_parameters") or ConfigReader({})
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


def _rope_scaling(scaling: ConfigReader, max_length: int, original_length: int) -> RopeScaling:
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


def _yarn_scaling(scaling: ConfigReader, original_length: int) -> YarnScaling:
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
