"""The executor in our compiled CPU kernels: float32, or int8 weights, one call per step."""

from __future__ import annotations

import logging
import os

import torch

from twinplane.process.logs import fields
from worker_service.domain.batch import StepBatch
from worker_service.domain.capability import Feature
from worker_service.domain.columns import IntColumn
from worker_service.domain.plan import StepPlan
from worker_service.kernels.cpu.adapters import CompiledAdapters
from worker_service.kernels.cpu.compiler import KernelsUnavailable, default_cache, ensure_library
from worker_service.kernels.cpu.library import Context
from worker_service.kernels.cpu.ops import (
    CpuKernels,
    PagedCache,
    instruction_set_for,
)
from worker_service.load_errors import ExecutorUnavailable
from worker_service.model.adapters import added_size, layer_parts
from worker_service.model.compiled_decoder import SUPPORTED_TRAITS, CompiledDecoder
from worker_service.model.loader import WeightLoader
from worker_service.model.memory import parameter_count, projections, step_size, table_size
from worker_service.model.spec import ProjectionSpec
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

_INT8_GROUP = 128

_logger = logging.getLogger(__name__)


class CompiledExecutor:
    """See Executor. Never reads a KV slot that its row has not written, so none is cleared."""

    def __init__(self, model: CompiledDecoder, build: str) -> None:
        self._model = model
        self._build = build

    @property
    def build(self) -> str:
        return self._build

    @property
    def weights_bytes(self) -> int:
        return self._model.weights_bytes

    @property
    def workspace_bytes(self) -> int:
        return self._model.workspace_bytes

    def take_blocks(self, plan: StepPlan) -> None:
        """Does nothing: see the class."""

    def run(self, batch: StepBatch, logit_indices: IntColumn) -> torch.Tensor:
        return self._model.forward(batch, logit_indices)


def _probe(config: ExecutorConfig) -> str | None:
    if config.device.type != "cpu":
        return f"the kernels are for the CPU, not for {config.device.type}"
    if config.data_type is not torch.float32:
        return f"the kernels compute in float32, not in {str(config.data_type).split('.')[-1]}"
    if config.ranks.size > 1:
        return (
            "the kernels run a whole model, not a rank's part of one "
            "(--tensor-parallel-size, --pipeline-parallel-size)"
        )
    lacking = refusal(config.spec, SUPPORTED_TRAITS)
    if lacking is not None:
        return lacking
    try:
        _open(config, threads=1).close()
    except KernelsUnavailable as unavailable:
        return str(unavailable)
    return None


def _open(config: ExecutorConfig, threads: int) -> CpuKernels:
    """Raises KernelsUnavailable. Builds the library first if it is not there."""
    path = ensure_library(default_cache(os.environ), _log_build, os.environ)
    best = Context(path, threads, None)
    head_dim = config.spec.layers[0].attention.heads.head_dim
    fitting = instruction_set_for(head_dim, best.head_dim_multiples)
    if fitting is best.instruction_set:
        return CpuKernels(best)
    best.close()
    return CpuKernels(Context(path, threads, fitting))


def _log_build(line: str) -> None:
    # Logged directly: the progress log drops lines that follow closely on another.
    _logger.info("building kernels", extra=fields(doing=line))


def _load(config: ExecutorConfig, loader: WeightLoader, cache: KVCache) -> Executor:
    try:
        kernels = _open(config, config.thread_count)
    except KernelsUnavailable as unavailable:
        raise ExecutorUnavailable(
            f"the compiled kernels cannot run: {unavailable}; fewer --threads may do"
        ) from unavailable
    adapters = config.adapters
    assert adapters is None or isinstance(adapters, CompiledAdapters)
    model = CompiledDecoder(
        kernels,
        config.spec,
        loader,
        [_paged_cache(layer, cache.block_size) for layer in cache.layers],
        max_length=config.limits.max_sequence_token_count,
        max_tokens=config.limits.max_step_token_count,
        max_rows=config.limits.max_sequence_count,
        group_size=_INT8_GROUP if config.quantization is Quantization.INT8 else None,
        progress=config.progress,
        adapters=adapters,
    )
    context = kernels.context
    return CompiledExecutor(model, f"kernels {context.build} {context.instruction_set.name}")


def _memory(config: ExecutorConfig) -> ExecutorMemory:
    kernels = _open(config, threads=1)  # the packed layout is the instruction set's
    try:
        weights_bytes = _weights_bytes(kernels, config)
    finally:
        kernels.close()
    limits, spec = config.limits, config.spec
    numbers = step_size(spec, limits.max_step_token_count, limits.max_sequence_count)
    workspace_bytes = numbers * torch.float32.itemsize
    if config.quantization is Quantization.INT8:  # a projection's input, as int16 with scales
        widest = max(each.input_count for each in projections(spec))
        scales = -(-widest // _INT8_GROUP)
        workspace_bytes += limits.max_step_token_count * (2 * widest + 4 * scales)
    if config.adapter_limits.slot_count:
        numbers = added_size(spec, config.adapter_limits.max_rank)
        workspace_bytes += limits.max_step_token_count * numbers * torch.float32.itemsize
    return ExecutorMemory(weights_bytes, workspace_bytes)


def _adapters(config: ExecutorConfig) -> AdapterMemory:
    kernels = _open(config, threads=1)
    try:
        width = kernels.context.head_dim_multiple
    finally:
        kernels.close()
    return CompiledAdapters(layer_parts(config.spec), config.adapter_limits, width)


def _weights_bytes(kernels: CpuKernels, config: ExecutorConfig) -> int:
    """Packed weights, and in float32 what is never packed: norms, biases and tables."""
    spec = config.spec
    group = _INT8_GROUP if config.quantization is Quantization.INT8 else None
    embedding = ProjectionSpec((spec.embedding,))
    head = spec.head or embedding
    packed = [(each, group) for each in (*projections(spec), head)]
    if spec.head is not None:
        packed.append((embedding, None))
    packed_bytes = sum(
        kernels.packed_bytes(each.output_count, each.input_count, group_size=size)
        for each, size in packed
    )
    matrices = sum(each.output_count * each.input_count for each, _ in packed)
    plain = parameter_count(spec) - matrices
    plain += table_size(spec, config.limits.max_sequence_token_count)
    return packed_bytes + plain * torch.float32.itemsize


def _paged_cache(layer: LayerMemory, block_size: int) -> PagedCache:
    """The layer's memory in the order that the kernels keep in each block."""
    heads, dim = layer.kv_head_count, layer.head_dim
    return PagedCache(
        layer.keys.view(-1, heads, dim, block_size),
        layer.values.view(-1, heads, block_size, dim),
    )


COMPILED = ExecutorType(
    "compiled",
    None,
    frozenset({Feature.BATCH_INVARIANT}),
    _probe,
    _load,
    _memory,
    _adapters,
    has_own_threads=True,
)
