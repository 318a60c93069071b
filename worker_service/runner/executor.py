"""What runs a whole forward pass, from a step's inputs to logits, and what it is loaded from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.batch import StepBatch
from worker_service.domain.capability import DataType, Feature, Limits, RankCoordinates
from worker_service.domain.columns import IntColumn
from worker_service.domain.plan import StepPlan
from worker_service.kernels.low_rank import LowRank
from worker_service.model.loader import WeightLoader
from worker_service.model.share import DecoderShare, share_of
from worker_service.model.spec import DecoderSpec
from worker_service.parallel.peers import Peers
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.options import Quantization


class AdapterMemory(Protocol):
    """Adapter slots in an executor's own layout. They outlive it: the next one reads them too.

    `prepare` may run on any thread, one at a time; the rest belongs to the device's thread.
    """

    @property
    def byte_count(self) -> int:
        """Memory of all slots, empty ones included, and of one more adapter."""
        ...

    def prepare(self, modules: Mapping[str, LowRank]) -> None:
        """Makes of an adapter what the executor reads, for the next `put`. Raises what the device
        raises where there is no memory."""
        ...

    def put(self, slot: int) -> int:
        """Puts what was prepared into a slot, counted from 1; returns the bytes that it takes."""
        ...

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        ...


class Executor(Protocol):
    """A loaded model over a KV pool. Belongs to the device's thread."""

    @property
    def build(self) -> str:
        """What its own code was built from and for, where that decides how results round."""
        ...

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and tables, packed copies included."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """Memory of the buffers kept between steps."""
        ...

    def take_blocks(self, plan: StepPlan) -> None:
        """Prepares the blocks that an applied plan gives to sequences. Call once, before `run`."""
        ...

    def run(self, batch: StepBatch, logit_indices: IntColumn) -> torch.Tensor:
        """Writes the step's KV and returns logits [L, vocabulary] of the tokens at
        `logit_indices` int32 [L], of which a row may have any number. On a rank that does not
        answer they are [0, vocabulary].

        The caller may overwrite the tensor. The next run overwrites it.
        """
        ...


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """What an executor has to serve: the model, its formats and the bounds of a step.

    `data_type` is the format that it computes in. `thread_count` is for an executor with threads of
    its own. `peers` are the other ranks of the replica, None where there are none. `adapters`, the
    executor type's own, are there where the limits have a slot.
    """

    spec: DecoderSpec
    device: torch.device
    data_type: torch.dtype
    quantization: Quantization
    kv_data_type: DataType
    block_size: int
    limits: Limits
    thread_count: int
    progress: Callable[[str], None]
    peers: Peers | None = None
    adapter_limits: AdapterLimits = field(default_factory=AdapterLimits)
    adapters: AdapterMemory | None = None

    @property
    def ranks(self) -> RankCoordinates:
        """This rank's place."""
        return RankCoordinates() if self.peers is None else self.peers.coordinates

    @property
    def share(self) -> DecoderShare:
        """What of the model this rank computes. Raises RanksUnfit."""
        return share_of(self.spec, self.ranks)


@dataclass(frozen=True, slots=True)
class ExecutorMemory:
    """What an executor will take beside the KV pool: weights with their tables and packed copies,
    and the buffers of its largest step."""

    weights_bytes: int
    workspace_bytes: int


@dataclass(frozen=True, slots=True)
class ExecutorType:
    """An executor that could be chosen.

    `attention_backend` names the backend that computes its attention; None where attention is its
    own. `probe` returns why it cannot run here, None when it can. `load` takes the weights and
    makes its caches from the pool's memory; it raises LoadError. `memory` says what a load that
    the probe allows will take. `adapters` makes the slots, still without memory. `features` are
    what it promises beyond the basic step. With `has_own_threads` it computes on its own threads,
    not on torch's.
    """

    name: str
    attention_backend: str | None
    features: frozenset[Feature]
    probe: Callable[[ExecutorConfig], str | None]
    load: Callable[[ExecutorConfig, WeightLoader, KVCache], Executor]
    memory: Callable[[ExecutorConfig], ExecutorMemory]
    adapters: Callable[[ExecutorConfig], AdapterMemory]
    has_own_threads: bool = False

    def __str__(self) -> str:
        if self.attention_backend is None:
            return self.name
        return f"{self.name} with {self.attention_backend} attention"
