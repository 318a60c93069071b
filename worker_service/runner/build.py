"""From options to a warm runner: opens the folder, sizes the pool, chooses attention, loads."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch

from worker_service.attention.interface import AttentionConfig
from worker_service.domain.capability import Capability, DataType, Feature, Limits, Model
from worker_service.domain.plan import WeightVersion
from worker_service.load_errors import LoadError, MemoryBudgetTooSmall
from worker_service.model.config import ModelConfig, parse_config
from worker_service.runner.device import describe, open_device
from worker_service.runner.forward_pass import ForwardPass, PassConfig
from worker_service.runner.kv_cache import KVCache, blocks_within
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.options import Quantization, RunnerOptions
from worker_service.runner.selection import select_pass
from worker_service.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model that can run steps, what it can do, and its KV pool."""

    capability: Capability
    forward_pass: ForwardPass
    cache: KVCache
    device: torch.device


def build_model_runner(options: RunnerOptions) -> ModelRunner:
    """Loads the model and warms it up. Call it on the thread that will own the device.

    Raises LoadError, whose message says what to do, when the options cannot be met.
    """
    loaded = load(options)
    runner = ModelRunner(loaded.capability, loaded.forward_pass, loaded.cache, loaded.device)
    options.progress("warming up")
    runner.warm_up()
    return runner


def load(options: RunnerOptions) -> LoadedModel:
    """The model without a runner. Raises LoadError."""
    device = open_device(options.device)
    options.progress(f"opening {options.model_folder}")
    with torch.inference_mode(), Checkpoint(options.model_folder) as checkpoint:
        config = parse_config(checkpoint.config)
        data_type = options.data_type or _default_data_type(config, device)
        kv_data_type = options.kv_data_type or data_type
        block_count = blocks_within(
            options.kv_cache_bytes, config, options.block_size, kv_data_type
        )
        limits = _limits(options, config, block_count)
        pass_config = PassConfig(
            attention=AttentionConfig(
                head_count=config.head_count,
                kv_head_count=config.kv_head_count,
                head_dim=config.head_dim,
                scale=1.0 / math.sqrt(config.head_dim),
                layer_windows=config.layer_windows,
                block_size=options.block_size,
                max_length=limits.max_sequence_token_count,
                data_type=getattr(torch, data_type.value),
                device=device,
            ),
            limits=limits,
            quantization=options.quantization,
            kv_data_type=kv_data_type,
            thread_count=options.thread_count,
            progress=options.progress,
        )
        chosen = select_pass(pass_config, options.attention_backend)
        _set_torch_threads(1 if chosen.has_own_threads else options.thread_count)
        options.progress("checking the weights' digest")
        digest = _arithmetic_digest(
            checkpoint.digest(), options.quantization, data_type, kv_data_type
        )
        cache = KVCache(config, block_count, options.block_size, kv_data_type, device)
        forward_pass = chosen.build(pass_config, config, checkpoint, cache)
    return LoadedModel(
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
            features=frozenset({Feature.HELD_SAMPLING}) | chosen.features,
            attention_backend=chosen.name,
            random_seed=options.random_seed,
        ),
        forward_pass=forward_pass,
        cache=cache,
        device=device,
    )


def _set_torch_threads(count: int) -> None:
    """Sets torch's number of threads, for the whole process. Nothing reads it.

    Beside a pass with threads of its own torch only copies and samples, and one thread has to do:
    more of them would wait, spinning, on cores that the pass needs. Loading would take ten times as
    long, and a step's few rows would gain nothing.
    """
    torch.set_num_threads(count)


def _default_data_type(config: ModelConfig, device: torch.device) -> DataType:
    if device.type == "cpu":
        return DataType.FLOAT32
    return config.data_type or DataType.BFLOAT16


def _arithmetic_digest(
    content: str, quantization: Quantization, data_type: DataType, kv_data_type: DataType
) -> str:
    """The content's own digest; where a setting makes other tokens than float32, one of both.

    A sequence then never goes on under other arithmetic than it began with.
    """
    settings = []
    if data_type is not DataType.FLOAT32:
        settings.append(f"dtype={data_type.value}")
    if quantization is not Quantization.NONE:
        settings.append(f"quantization={quantization.value}")
    if kv_data_type is not data_type:
        settings.append(f"kv_cache_dtype={kv_data_type.value}")
    if not settings:
        return content
    return hashlib.sha256("\0".join((content, *settings)).encode()).hexdigest()


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
