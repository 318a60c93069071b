"""What a config.json says about rotary positions, in the words of transformers 4 and 5."""

from __future__ import annotations

import math
from itertools import pairwise

from worker_service.layers.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    RopeScaling,
    Unscaled,
    YarnScaling,
)
from worker_service.load_errors import CheckpointInvalid, ModelUnsupported
from worker_service.model.config import ConfigReader, contradiction

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
_HOLDERS = ("rope_scaling", "rope_parameters")
# Numbers that some kind of scaling reads. A wrong type is refused in every kind.
_NUMBERS = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)


def read_rope(reader: ConfigReader, head_dim: int, max_length: int) -> Rope:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    A fact may be told in several places if they agree. One kind for all layers, over whole heads.
    Raises ModelUnsupported for any other, CheckpointInvalid for what makes no sense.
    """
    if head_dim % 2:
        raise ModelUnsupported("head_dim", head_dim, "even sizes")
    _refuse_partial(reader)
    holders = [holder for key in _HOLDERS if (holder := reader.child(key)) is not None]
    ropes = [
        _read(reader, holder, head_dim, max_length) for holder in holders or [ConfigReader({})]
    ]
    for first, second in pairwise(ropes):
        if first != second:
            raise contradiction(_HOLDERS[0], holders[0].values, _HOLDERS[1], holders[1].values)
    return ropes[0]


def reached_length(rope: Rope, max_length: int) -> int:
    """The positions for which the model was made: YaRN reaches beyond those of its training."""
    if not isinstance(rope.scaling, YarnScaling):
        return max_length
    return max(max_length, int(rope.scaling.original_length * rope.scaling.factor))


def _read(reader: ConfigReader, holder: ConfigReader, head_dim: int, max_length: int) -> Rope:
    if any(isinstance(value, dict) for value in holder.values.values()):
        raise ModelUnsupported(
            holder.prefix.rstrip("."), "one per kind of layer", "one for all layers"
        )
    _refuse_partial(holder)
    for key in _NUMBERS:
        holder.number_or_none(key)
    theta = reader.number("rope_theta", holder.number("rope_theta", _DEFAULT_THETA))
    _refuse_difference(reader, holder, "rope_theta")
    original_length = reader.integer(
        "original_max_position_embeddings",
        holder.integer("original_max_position_embeddings", max_length),
    )
    _refuse_difference(reader, holder, "original_max_position_embeddings")
    rope = Rope(theta, head_dim, _scaling(holder, max_length, original_length))
    match rope:
        case Rope(theta=1.0, scaling=YarnScaling()):
            raise CheckpointInvalid("config.json: rope_theta is 1, with which YaRN can't work")
        case Rope(rotary_dim=2, scaling=DynamicScaling()):
            raise CheckpointInvalid("config.json: head_dim is 2, too small for dynamic scaling")
        case _:
            return rope


def _refuse_partial(holder: ConfigReader) -> None:
    share = holder.number_or_none("partial_rotary_factor")
    if share not in (None, 1.0):
        raise ModelUnsupported("partial_rotary_factor", share, "1")


def _refuse_difference(reader: ConfigReader, holder: ConfigReader, key: str) -> None:
    if key in reader.values and key in holder.values and reader.values[key] != holder.values[key]:
        raise contradiction(key, reader.values[key], f"{holder.prefix}{key}", holder.values[key])


def _scaling(holder: ConfigReader, max_length: int, original_length: int) -> RopeScaling:
    kinds = {key: holder.values[key] for key in ("rope_type", "type") if key in holder.values}
    kind = next(iter(kinds.values()), "default")
    if kinds.get("type", kind) is not kind and kinds["type"] != kind:
        raise contradiction(
            f"{holder.prefix}rope_type", kind, f"{holder.prefix}type", kinds["type"]
        )
    match kind:
        case "default":
            return Unscaled()
        case "linear":
            return LinearScaling(holder.number("factor"))
        case "dynamic":
            return DynamicScaling(holder.number("factor"), max_length)
        case "llama3":
            return Llama3Scaling(
                factor=holder.number("factor"),
                low_frequency_factor=holder.number("low_freq_factor"),
                high_frequency_factor=holder.number("high_freq_factor"),
                original_length=original_length,
            )
        case "yarn":
            return _yarn_scaling(holder, original_length)
        case _:
            raise ModelUnsupported("rope_type", kind, ", ".join(ROPE_TYPES)) from None


def _yarn_scaling(holder: ConfigReader, original_length: int) -> YarnScaling:
    factor = holder.number("factor")

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = holder.number_or_none("attention_factor")
    if attention_factor is None:
        attention_factor = magnitude(1.0)
        scale, all_scale = (holder.number_or_none(key) for key in ("mscale", "mscale_all_dim"))
        if scale is not None and all_scale is not None:
            attention_factor = magnitude(scale) / magnitude(all_scale)
    return YarnScaling(
        factor=factor,
        original_length=original_length,
        attention_factor=attention_factor,
        beta_fast=holder.number_or_none("beta_fast") or 32.0,
        beta_slow=holder.number_or_none("beta_slow") or 1.0,
        truncate=holder.flag("truncate", True),
    )
