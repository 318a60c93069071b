"""What a model's rotary positions are: base, width and scaling. Values only, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unscaled:
    """Plain RoPE."""


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class DynamicScaling:
    """NTK-aware: past `original_length` the base grows with the position.

    transformers rotates every position of one call by the base of the call's longest. A table
    cannot depend on the batch, so each position here takes the base of the sequence that ends with
    it: the same as transformers up to `original_length`, and when it decodes token by token.
    """

    factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are stretched, short ones kept, those between blended."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al. 2023, arXiv:2309.00071). `attention_factor` multiplies cos and sin."""

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


RopeScaling = Unscaled | LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class Rope:
    """`theta` is the base of the wavelengths. The first `rotary_dim` numbers of each head are
    rotated, an even count."""

    theta: float
    rotary_dim: int
    scaling: RopeScaling
