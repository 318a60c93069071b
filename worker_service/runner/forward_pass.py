"""How a step's inputs become logits, whatever computes them, and what a way of it is built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from worker_service.attention.interface import AttentionConfig
from worker_service.domain.capability import DataType, Feature, Limits
from worker_service.domain.plan import StepPlan
from worker_service.model.config import ModelConfig
from worker_service.runner.input_batch import InputBatch
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.options import Quantization
from worker_service.weights.checkpoint import Checkpoint


class ForwardPass(Protocol):
    """A loaded model over a KV pool. Belongs to the device's thread."""

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and tables, packed copies included."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """Memory of the buffers kept between steps."""
        ...

    def take_blocks(self, plan: StepPlan) -> None:
        """Readies the blocks that an applied plan hands to sequences. Once, before `run`."""
        ...

    def run(self, batch: InputBatch) -> torch.Tensor:
        """Writes the step's KV and returns logits [S, vocabulary] of its sampled rows.

        The tensor may be overwritten by the caller, and is by the next run.
        """
        ...


@dataclass(frozen=True, slots=True)
class PassConfig:
    """What a forward pass has to serve. `attention` holds the compute dtype and the device;
    `thread_count` is for a pass with threads of its own."""

    attention: AttentionConfig
    limits: Limits
    quantization: Quantization
    kv_data_type: DataType
    thread_count: int
    progress: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PassType:
    """A way to run the model that could be chosen.

    `probe` says why it cannot run here, None when it can; `build` loads the weights and raises
    LoadError. `features`: what it promises beyond the basic step. `has_own_threads`: it computes on
    threads of its own, not on torch's.
    """

    name: str
    features: frozenset[Feature]
    probe: Callable[[PassConfig], str | None]
    build: Callable[[PassConfig, ModelConfig, Checkpoint, KVCache], ForwardPass]
    has_own_threads: bool = False
