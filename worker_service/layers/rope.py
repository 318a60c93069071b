"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and its scaling variants.

The frequencies are those that transformers computes (`transformers/modeling_rope_utils.py`); the
angles of every position are tabulated once, so a step only gathers rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import assert_never

import torch

from worker_service.layers.rope_scaling import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    Rope,
    Unscaled,
    YarnScaling,
)


@dataclass(frozen=True, slots=True, eq=False)
class RopeTable:
    """`cos`, `sin` [positions, rotary_dim / 2], attention scaling included."""

    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def byte_count(self) -> int:
        return self.cos.nbytes + self.sin.nbytes

    def gather(self, positions: torch.Tensor) -> RopeTable:
        """Rows for `positions` int [tokens], shaped [tokens, 1, rotary_dim / 2] for all heads."""
        return RopeTable(
            self.cos.index_select(0, positions).unsqueeze(1),
            self.sin.index_select(0, positions).unsqueeze(1),
        )


def build_table(rope: Rope, length: int, dtype: torch.dtype, device: torch.device) -> RopeTable:
    """The table of positions 0 … length - 1; angles are computed in float32."""
    positions = torch.arange(length, dtype=torch.float32).unsqueeze(1)
    angles = positions * _inverse_frequencies(rope, length)
    scale = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return RopeTable(
        (angles.cos() * scale).to(device=device, dtype=dtype),
        (angles.sin() * scale).to(device=device, dtype=dtype),
    )


def rotate(x: torch.Tensor, table: RopeTable) -> torch.Tensor:
    """x [tokens, heads, head_dim], its first rotary_dim numbers rotated by gathered rows, in a new
    tensor. Pairs are (i, i + rotary_dim / 2)."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rotary_dim = 2 * table.cos.shape[-1]
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    out_first, out_second = out[..., :rotary_dim].chunk(2, dim=-1)
    torch.mul(first, table.cos, out=out_first).addcmul_(second, table.sin, value=-1)
    torch.mul(second, table.cos, out=out_second).addcmul_(first, table.sin)
    if rotary_dim < x.shape[-1]:
        out[..., rotary_dim:] = x[..., rotary_dim:]
    return out


def _inverse_frequencies(rope: Rope, length: int) -> torch.Tensor:
    """float32 [1 or length, rotary_dim / 2]: radians per position."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = (1.0 / rope.theta**exponents).unsqueeze(0)
    match rope.scaling:
        case Unscaled():
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case DynamicScaling() as scaling:
            return _dynamic(rope, scaling, exponents, length)
        case Llama3Scaling() as scaling:
            return _llama3(scaling, plain)
        case YarnScaling() as scaling:
            return _yarn(rope, scaling, exponents)
        case _:
            assert_never(rope.scaling)


def _dynamic(
    rope: Rope, scaling: DynamicScaling, exponents: torch.Tensor, length: int
) -> torch.Tensor:
    lengths = torch.arange(1, length + 1, dtype=torch.float64).clamp_(min=scaling.original_length)
    growth = scaling.factor * lengths / scaling.original_length - (scaling.factor - 1)
    bases = rope.theta * growth ** (rope.rotary_dim / (rope.rotary_dim - 2))
    return (1.0 / bases.unsqueeze(1) ** exponents.double()).float()


def _llama3(scaling: Llama3Scaling, plain: torch.Tensor) -> torch.Tensor:
    wavelengths = 2 * math.pi / plain
    low = scaling.original_length / scaling.low_frequency_factor
    high = scaling.original_length / scaling.high_frequency_factor
    stretched = plain / scaling.factor
    blend = (scaling.original_length / wavelengths - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    blended = (1 - blend) * stretched + blend * plain
    result = torch.where(wavelengths > low, stretched, plain)
    between = (wavelengths >= high) & (wavelengths <= low)
    return torch.where(between, blended, result)


def _yarn(rope: Rope, scaling: YarnScaling, exponents: torch.Tensor) -> torch.Tensor:
    def dimension(rotations: float) -> float:
        """The dimension that turns `rotations` times over the original length."""
        return (
            rope.rotary_dim
            * math.log(scaling.original_length / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    if low == high:
        high += 0.001  # as the reference does: no division by zero
    ramp = (torch.arange(rope.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)
    stretched_share = ramp.clamp(0, 1)
    wavelengths = rope.theta**exponents
    stretched, kept = 1.0 / (scaling.factor * wavelengths), 1.0 / wavelengths
    return (stretched * stretched_share + kept * (1 - stretched_share)).unsqueeze(0)
