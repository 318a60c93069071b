"""From options to a warm runner: opens the folder, sizes the pool, chooses attention, loads."""

from __future__ import annotations

import math

import torch

from worker_service.attention.interface import AttentionConfig
from worker_service.attention.selection import select_backend
from worker_service.domain import Capability, DataType, Feature, Limits, Model, WeightVersion
from worker_service.model.config import ModelConfig, parse_config
from worker_service.model.registry import load_model
from worker_service.runner.device import describe, open_device
from worker_service.runner.kv_cache import KVCache, blocks_within
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.options import RunnerOptions
from worker_service.weights.checkpoint import Checkpoint
from worker_service.weights.errors import LoadError, MemoryBudgetTooSmall


def build_model_runner(options: RunnerOptions) -> ModelRunner:
    """Loads the model and warms it up. Call it on the thread that will own the device.

    Raises LoadError, whose message says what to do, when the options cannot be met.
    """
    if options.thread_count is not None:
        torch.set_num_threads(options.thread_count)
    device = open_device(options.device)
    options.progress(f"opening {options.model_folder}")
    with torch.inference_mode(), Checkpoint(options.model_folder) as checkpoint:
        config = parse_config(checkpoint.config)
        data_type = options.data_type or _default_data_type(config, device)
        dtype: torch.dtype = getattr(torch, data_type.value)
        block_count = blocks_within(options.kv_cache_bytes, config, options.block_size, data_type)
        limits = _limits(options, config, block_count)
        attention = AttentionConfig(
            head_count=config.head_count,
            kv_head_count=config.kv_head_count,
            head_dim=config.head_dim,
            scale=1.0 / math.sqrt(config.head_dim),
            layer_windows=config.layer_windows,
            block_size=options.block_size,
            max_length=limits.max_sequence_token_count,
            data_type=dtype,
            device=device,
        )
        backend_type = select_backend(attention, options.attention_backend)
        options.progress("checking the weights' digest")
        digest = checkpoint.digest()
        model = load_model(
            checkpoint, config, limits.max_sequence_token_count, dtype, device, options.progress
        )
        cache = KVCache(config, block_count, options.block_size, data_type, device)
        backend = backend_type.build(attention, cache.layers)
    runner = ModelRunner(
        capability=Capability(
            device=describe(device),
            model=Model(
                options.model_name,
                config.architecture.value,
                config.vocabulary_size,
                data_type,
            ),
            weight_version=WeightVersion(1, digest),
            limits=limits,
            features=frozenset({Feature.HELD_SAMPLING}),
            attention_backend=backend_type.name,
            random_seed=options.random_seed,
        ),
        model=model,
        cache=cache,
        backend=backend,
        device=device,
    )
    options.progress("warming up")
    runner.warm_up()
    return runner


def _default_data_type(config: ModelConfig, device: torch.device) -> DataType:
    if device.type == "cpu":
        return DataType.FLOAT32
    return config.data_type or DataType.BFLOAT16


def _limits(options: RunnerOptions, config: ModelConfig, block_count: int) -> Limits:
    """Bounds that model and pool can keep: any one sequence fits the pool alone."""
    capacity = (block_count - 1) * options.block_size
    wanted = options.max_sequence_token_count
    if wanted is None:
        length = min(config.max_length, capacity)
        if length < config.max_length:
            options.progress(
                f"sequences are limited to {length} tokens: the KV pool holds no more, the model "
                f"could take {config.max_length}"
            )
    elif wanted > config.max_length:
        raise LoadError(
            f"sequences of {wanted} tokens were asked for; the model takes {config.max_length}"
        )
    elif wanted > capacity:
        raise MemoryBudgetTooSmall(
            f"sequences of {wanted} tokens were asked for; a KV pool of {options.kv_cache_bytes} "
            f"bytes holds {capacity} tokens"
        )
    else:
        length = wanted
    return Limits(
        max_sequence_count=options.max_sequence_count,
        max_step_token_count=options.max_step_token_count,
        max_sequence_token_count=length,
        max_prompt_token_count=length,
    )
