"""LoRA adapters: small weights beside a model's own, in slots. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker_service.domain.weights import TensorDescription


@dataclass(frozen=True, slots=True)
class AdapterDescription:
    """What an adapter is. `digest`: hex SHA-256 of what decides its results. `rank` and `scale` are
    those of its config.json, from which single modules may differ. `target_modules` are the last
    parts of the names of what it changes, e.g. q_proj."""

    digest: str
    rank: int
    scale: float
    target_modules: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """What a slot, counted from 1, holds, and the bytes that it takes on the device."""

    slot: int
    adapter: AdapterDescription
    device_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor as it came: row-major, little-endian."""

    description: TensorDescription
    data: bytearray


@dataclass(frozen=True, slots=True, eq=False)
class LowRankPair:
    """What is added to one module: scale · B (A x), with A [rank, inputs] and B [outputs, rank]."""

    a: StoredTensor
    b: StoredTensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """A whole adapter, read and checked. `modules` by their names in the model, e.g.
    model.layers.0.self_attn.q_proj."""

    description: AdapterDescription
    modules: Mapping[str, LowRankPair]


@dataclass(frozen=True, slots=True)
class AdaptedPart:
    """Where a module's outputs are in a stacked projection, and which part of its matrices is
    meant: `outputs` of B's rows and `inputs` of A's columns, all but on one of several ranks.
    `first` is the place of the first of them among the projection's outputs."""

    module: str
    first: int
    outputs: range
    inputs: range


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """How many adapters fit, and the highest rank of each. Without slots nothing is kept."""

    slot_count: int = 0
    max_rank: int = 0
