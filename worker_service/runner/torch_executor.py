"""The executor in torch: a TorchDecoder over an attention backend, on any device, in any dtype."""

from __future__ import annotations

from math import prod

import numpy as np
import torch

from worker_service.attention.interface import (
    AttentionBackend,
    AttentionConfig,
    BackendType,
    LayerCache,
)
from worker_service.domain.batch import StepBatch
from worker_service.domain.columns import IntColumn
from worker_service.domain.plan import StepPlan
from worker_service.layers.adapters import TorchAdapters
from worker_service.layers.linear import is_packed
from worker_service.model.adapters import layer_parts
from worker_service.model.loader import WeightLoader
from worker_service.model.memory import exchange_size, parameter_count, step_size, table_size
from worker_service.model.torch_decoder import SUPPORTED_TRAITS, TorchDecoder
from worker_service.model.traits import refusal
from worker_service.runner.executor import (
    AdapterMemory,
    Executor,
    ExecutorConfig,
    ExecutorMemory,
    ExecutorType,
)
from worker_service.runner.kv_cache import KVCache, LayerMemory
from worker_service.runner.options import Quantization


class TorchExecutor:
    """See Executor."""

    def __init__(
        self,
        model: TorchDecoder,
        backend: AttentionBackend,
        cache: KVCache,
        device: torch.device,
        adapters: TorchAdapters | None = None,
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._backend = backend
        self._cache = cache
        self._device = device

    @property
    def build(self) -> str:
        return ""  # torch's version says it

    @property
    def weights_bytes(self) -> int:
        return self._model.weights_bytes

    @property
    def workspace_bytes(self) -> int:
        return self._backend.workspace_bytes

    def take_blocks(self, plan: StepPlan) -> None:
        # Masked positions are still multiplied here: none may hold a NaN.
        self._cache.clear_taken(plan)

    def run(self, batch: StepBatch, logit_indices: IntColumn) -> torch.Tensor:
        if self._adapters is not None:
            self._adapters.select(batch)
        return self._model.forward(
            self._to_device(batch.token_ids),
            self._to_device(batch.positions),
            self._backend.plan(batch),
            self._to_device(logit_indices),
        )

    def _to_device(self, column: IntColumn) -> torch.Tensor:
        return torch.from_numpy(column.astype(np.int64)).to(self._device)


def torch_executor(backend: BackendType) -> ExecutorType:
    """The torch executor with this attention backend."""

    def probe(config: ExecutorConfig) -> str | None:
        if config.quantization is not Quantization.NONE:
            return f"{config.quantization.value} weights need the compiled executor"
        if getattr(torch, config.kv_data_type.value) is not config.data_type:
            return f"{config.kv_data_type.value} KV under other weights needs the compiled executor"
        return refusal(config.spec, SUPPORTED_TRAITS) or backend.probe(_attention(config))

    def load(config: ExecutorConfig, loader: WeightLoader, cache: KVCache) -> Executor:
        adapters = config.adapters
        assert adapters is None or isinstance(adapters, TorchAdapters)
        model = TorchDecoder(
            config.share,
            loader,
            config.limits.max_sequence_token_count,
            config.data_type,
            config.device,
            config.progress,
            config.peers,
            adapters,
        )
        caches = tuple(_layer_cache(layer, cache.block_size) for layer in cache.layers)
        return TorchExecutor(
            model, backend.create(_attention(config), caches), cache, config.device, adapters
        )

    def memory(config: ExecutorConfig) -> ExecutorMemory:
        share, limits, size = config.share, config.limits, config.data_type.itemsize
        numbers = parameter_count(share) + table_size(share, limits.max_sequence_token_count)
        if share.is_tied and share.embedding and is_packed(config.device, config.data_type):
            numbers += prod(share.embedding.shape)  # the head is a packed copy
        logit_count = min(limits.max_sequence_count, limits.max_step_token_count)
        step = step_size(share, limits.max_step_token_count, logit_count)
        step += exchange_size(share, limits.max_step_token_count, logit_count)
        return ExecutorMemory(
            weights_bytes=numbers * size,
            workspace_bytes=backend.workspace(_attention(config)) + step * size,
        )

    return ExecutorType("torch", backend.name, frozenset(), probe, load, memory, _adapters)


def _adapters(config: ExecutorConfig) -> AdapterMemory:
    parts = [part for layer in layer_parts(config.share) for each in layer for part in each]
    return TorchAdapters(parts, config.adapter_limits, config.data_type, config.device)


def _attention(config: ExecutorConfig) -> AttentionConfig:
    return AttentionConfig(
        layers=tuple(layer.attention.heads for layer in config.share.layers),
        block_size=config.block_size,
        max_length=config.limits.max_sequence_token_count,
        data_type=config.data_type,
        device=config.device,
    )


def _layer_cache(layer: LayerMemory, block_size: int) -> LayerCache:
    shape = (-1, block_size, layer.kv_head_count, layer.head_dim)
    return LayerCache(layer.keys.view(shape), layer.values.view(shape))
