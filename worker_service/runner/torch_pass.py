"""The forward pass in torch: a Model and an attention backend, on any device and in any dtype."""

from __future__ import annotations

import numpy as np
import torch

from worker_service.attention.interface import AttentionBackend, AttentionBatch, BackendType
from worker_service.domain.columns import IntColumn
from worker_service.domain.plan import StepPlan
from worker_service.model.config import ModelConfig
from worker_service.model.interface import Model
from worker_service.model.registry import load_model
from worker_service.runner.forward_pass import ForwardPass, PassConfig, PassType
from worker_service.runner.input_batch import InputBatch
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.options import Quantization
from worker_service.weights.checkpoint import Checkpoint


class TorchPass:
    """See ForwardPass."""

    def __init__(
        self, model: Model, backend: AttentionBackend, cache: KVCache, device: torch.device
    ) -> None:
        self._model = model
        self._backend = backend
        self._cache = cache
        self._device = device

    @property
    def weights_bytes(self) -> int:
        return self._model.weights_bytes

    @property
    def workspace_bytes(self) -> int:
        return self._backend.workspace_bytes

    def take_blocks(self, plan: StepPlan) -> None:
        # Masked positions are still multiplied here: none may hold a NaN.
        self._cache.clear_taken(plan)

    def run(self, batch: InputBatch) -> torch.Tensor:
        attention = self._backend.plan(
            AttentionBatch(
                query_lengths=batch.query_lengths,
                query_starts=batch.query_starts,
                context_lengths=batch.context_lengths,
                block_tables=batch.block_tables,
                slots=batch.slots,
            )
        )
        return self._model.forward(
            self._to_device(batch.token_ids),
            self._to_device(batch.positions),
            attention,
            self._to_device(batch.logit_indices),
        )

    def _to_device(self, column: IntColumn) -> torch.Tensor:
        return torch.from_numpy(column.astype(np.int64)).to(self._device)


def torch_pass(backend: BackendType) -> PassType:
    """The torch pass with this attention backend, under its name."""

    def probe(config: PassConfig) -> str | None:
        if config.quantization is not Quantization.NONE:
            return f"{config.quantization.value} weights need the compiled kernels"
        if getattr(torch, config.kv_data_type.value) is not config.attention.data_type:
            return f"{config.kv_data_type.value} KV under other weights needs the compiled kernels"
        return backend.probe(config.attention)

    def build(
        config: PassConfig, model_config: ModelConfig, checkpoint: Checkpoint, cache: KVCache
    ) -> ForwardPass:
        attention = config.attention
        model = load_model(
            checkpoint,
            model_config,
            attention.max_length,
            attention.data_type,
            attention.device,
            config.progress,
        )
        return TorchPass(model, backend.build(attention, cache.layers), cache, attention.device)

    return PassType(backend.name, frozenset(), probe, build)
