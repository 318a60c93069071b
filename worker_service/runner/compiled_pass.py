"""The forward pass in our compiled CPU kernels: float32, or int8 weights, one call per step."""

from __future__ import annotations

import logging
import os

import torch

from twinplane.process.logs import fields
from worker_service.attention.interface import LayerCache
from worker_service.domain.capability import Feature
from worker_service.domain.plan import StepPlan
from worker_service.kernels.cpu.compiler import KernelsUnavailable, default_cache, ensure_library
from worker_service.kernels.cpu.library import Context
from worker_service.kernels.cpu.ops import (
    CpuKernels,
    PagedCache,
    StepBatch,
    instruction_set_for,
)
from worker_service.load_errors import BackendUnavailable
from worker_service.model.compiled_llama import CompiledLlama
from worker_service.model.config import ModelConfig
from worker_service.model.loader import WeightLoader
from worker_service.runner.forward_pass import ForwardPass, PassConfig, PassType
from worker_service.runner.input_batch import InputBatch
from worker_service.runner.kv_cache import KVCache
from worker_service.runner.options import Quantization
from worker_service.weights.checkpoint import Checkpoint

_INT8_GROUP = 128

_logger = logging.getLogger(__name__)


class CompiledPass:
    """See ForwardPass. Never reads a KV slot that its row has not written: none is cleared."""

    def __init__(self, model: CompiledLlama) -> None:
        self._model = model

    @property
    def weights_bytes(self) -> int:
        return self._model.weights_bytes

    @property
    def workspace_bytes(self) -> int:
        return self._model.workspace_bytes

    def take_blocks(self, plan: StepPlan) -> None:
        """Nothing is to be done: see the class."""

    def run(self, batch: InputBatch) -> torch.Tensor:
        return self._model.forward(
            batch.token_ids,
            StepBatch(
                query_starts=batch.query_starts,
                context_lengths=batch.context_lengths,
                block_tables=batch.block_tables,
                positions=batch.positions,
                slots=batch.slots,
            ),
            batch.logit_indices,
        )


def _probe(config: PassConfig) -> str | None:
    attention = config.attention
    if attention.device.type != "cpu":
        return f"the kernels are for the CPU, not for {attention.device.type}"
    if attention.data_type is not torch.float32:
        return f"the kernels compute in float32, not in {str(attention.data_type).split('.')[-1]}"
    try:
        _open(config, threads=1).close()
    except KernelsUnavailable as unavailable:
        return str(unavailable)
    return None


def _open(config: PassConfig, threads: int) -> CpuKernels:
    """Raises KernelsUnavailable. Builds the library first if it is not there."""
    path = ensure_library(default_cache(os.environ), _log_build, os.environ)
    best = Context(path, threads, None)
    fitting = instruction_set_for(config.attention.head_dim, best.supported())
    if fitting is best.instruction_set:
        return CpuKernels(best)
    best.close()
    return CpuKernels(Context(path, threads, fitting))


def _log_build(line: str) -> None:
    # A line of its own: progress lines that follow closely on another are left out.
    _logger.info("building kernels", extra=fields(doing=line))


def _build(
    config: PassConfig, model_config: ModelConfig, checkpoint: Checkpoint, cache: KVCache
) -> ForwardPass:
    try:
        kernels = _open(config, config.thread_count)
    except KernelsUnavailable as unavailable:
        raise BackendUnavailable(f"the compiled kernels cannot run: {unavailable}") from unavailable
    attention, limits = config.attention, config.limits
    model = CompiledLlama(
        kernels,
        model_config,
        WeightLoader(checkpoint, attention.data_type, attention.device),
        [_own_layout(layer) for layer in cache.layers],
        max_length=attention.max_length,
        max_tokens=limits.max_step_token_count,
        max_rows=limits.max_sequence_count,
        group_size=_INT8_GROUP if config.quantization is Quantization.INT8 else None,
        progress=config.progress,
    )
    return CompiledPass(model)


def _own_layout(layer: LayerCache) -> PagedCache:
    """The same memory, in the order that the kernels keep in each block."""
    blocks, block_size, kv_heads, head_dim = layer.keys.shape
    return PagedCache(
        layer.keys.view(blocks, kv_heads, head_dim, block_size),
        layer.values.view(blocks, kv_heads, block_size, head_dim),
    )


COMPILED = PassType(
    "compiled", frozenset({Feature.BATCH_INVARIANT}), _probe, _build, has_own_threads=True
)
