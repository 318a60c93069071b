"""What an attention backend is: paged causal attention over rows of any query length.

Everything is "extend": a decoding row has one query token, a prompt's chunk many. A backend
answers `probe` before it is built, plans once per step for all layers, then writes each layer's KV
and attends. Batch composition comes as host columns so that planning never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    # What a model asks of attention is also read where there is no torch.
    import torch

    from worker_service.domain.batch import StepBatch


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """One layer's attention: causal, with `head_count` query heads over `kv_head_count` KV heads.

    `head_count` is a multiple of `kv_head_count`. `scale` multiplies query · key. `window`: how
    many positions a token attends to, its own included; None: all.
    """

    head_count: int
    kv_head_count: int
    head_dim: int
    scale: float
    window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Fixed facts of a model's attention on one device; `max_length` bounds a row's context in
    tokens. Layers may differ in everything."""

    layers: tuple[LayerAttention, ...]
    block_size: int
    max_length: int
    data_type: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True, eq=False)
class LayerCache:
    """One layer's KV: `keys`, `values` [blocks, block_size, kv_heads, head_dim] in this order.

    A backend multiplies masked positions, too. So whoever owns the memory keeps every slot finite
    that lies in the null block or in a block of a row, whether a row has written it or not.
    """

    keys: torch.Tensor
    values: torch.Tensor


class StepAttention(Protocol):
    """A planned step. Used once per layer, in the order write_kv, forward."""

    def write_kv(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores keys and values [tokens, kv_heads, head_dim] into the step's slots."""
        ...

    def forward(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attends queries [tokens, heads, head_dim] → new [tokens, heads, head_dim]."""
        ...


class AttentionBackend(Protocol):
    """Plans steps over the caches it was built with."""

    @property
    def workspace_bytes(self) -> int:
        """Memory of the buffers it keeps between steps."""
        ...

    def plan(self, batch: StepBatch) -> StepAttention:
        """Prepares one step for all layers. The result is valid until the next plan."""
        ...


@dataclass(frozen=True, slots=True)
class BackendType:
    """A backend that could be chosen. `probe` says why it cannot run, None when it can.

    `workspace` is what a created one says of its workspace_bytes, known beforehand.
    """

    name: str
    probe: Callable[[AttentionConfig], str | None]
    create: Callable[[AttentionConfig, tuple[LayerCache, ...]], AttentionBackend]
    workspace: Callable[[AttentionConfig], int]
