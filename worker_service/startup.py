"""From settings to a runner: the real one, or the simulated. Runs on the device thread.

torch is imported lazily, by what the real runner needs, so a simulated worker never needs it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinplane import models
from twinplane.extras import Extra, how_to_get
from twinplane.models.folder import read_config
from twinplane.paths import as_text
from twinplane.settings.worker import WorkerConfig
from worker_service.domain.capability import DataType, Limits
from worker_service.model.config import ConfigReader
from worker_service.runner.interface import Runner
from worker_service.runner.options import Quantization, RunnerOptions
from worker_service.simulated.runner import SimulatedLatency, SimulatedModel, SimulatedRunner
from worker_service.threads import resolve_threads

_DEFAULT_LENGTH = 8_192
# Only the built-in simulated model has it: its single bytes are read and never written, so that
# what a simulated worker answers can be read, too.
_FIRST_TOKEN_KEY = "simulated_first_token_id"


class StartupError(Exception):
    """The worker can't start with these settings; the message says what to do."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What a simulated worker takes from a model's config.json.

    Its tokens are `first_token` and those behind it.
    """

    vocabulary_size: int
    length: int
    architecture: str
    first_token: int = 0


def start_runner(config: WorkerConfig, progress: Callable[[str], None]) -> Runner:
    """The runner that the settings ask for.

    Raises StartupError, twinplane.models.ModelError, or a LoadError.
    """
    if config.simulate:
        return _simulated_runner(config)
    return _real_runner(config, progress)


def _real_runner(config: WorkerConfig, progress: Callable[[str], None]) -> Runner:
    # Must be set before torch is imported. Otherwise its threads spin for milliseconds after each
    # operation, on cores that the control plane needs. Measured on two cores: with 10,000 spins a
    # step costs the same when nobody else uses the cores, and far less when they are shared.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        from worker_service.runner.load import load_runner
    except ModuleNotFoundError as error:
        raise StartupError(
            f"a worker with a model needs the module {error.name}: "
            f"{how_to_get(Extra.WORKER)}; or start with --simulate"
        ) from error
    except (ImportError, OSError) as error:  # a library that torch needs is missing or broken
        raise StartupError(
            f"torch is installed and can't be imported: {' '.join(str(error).split())}"
        ) from error
    progress("looking for the model")
    return load_runner(_runner_options(config, models.resolve(config.model), progress))


def _runner_options(
    config: WorkerConfig, folder: Path, progress: Callable[[str], None]
) -> RunnerOptions:
    from worker_service.runner.device import (
        available_device,
        default_kv_cache_bytes,
        open_device,
    )

    device = available_device() if config.device == "auto" else config.device
    open_device(device)  # before it is asked for its memory
    on_cpu = device == "cpu"
    return RunnerOptions(
        model_folder=folder,
        model_name=_model_name(config),
        device=device,
        data_type=None if config.dtype == "auto" else DataType(config.dtype),
        quantization=Quantization(config.quantization),
        kv_data_type=None if config.kv_cache_dtype == "auto" else DataType(config.kv_cache_dtype),
        block_size=config.block_size,
        kv_cache_bytes=_or_else(
            config.kv_cache_memory_bytes, lambda: default_kv_cache_bytes(device, folder)
        ),
        max_sequence_count=_or_else(config.max_num_seqs, lambda: 64 if on_cpu else 256),
        max_step_token_count=_or_else(
            config.max_num_batched_tokens, lambda: 512 if on_cpu else 8192
        ),
        max_sequence_token_count=config.max_model_len,
        executor=_unless_auto(config.executor),
        attention_backend=_unless_auto(config.attention_backend),
        thread_count=resolve_threads(config.threads).count,
        random_seed=config.seed,
        progress=progress,
    )


def _simulated_runner(config: WorkerConfig) -> SimulatedRunner:
    shape = _simulated_shape(config)
    capacity = (config.simulate_block_count - 1) * config.block_size
    length = _or_else(config.max_model_len, lambda: min(shape.length, capacity))
    if length > capacity:
        raise StartupError(
            f"--max-model-len is {length}, "
            f"but {config.simulate_block_count} blocks hold {capacity} "
            "tokens: raise --simulate-block-count"
        )
    limits = Limits(
        max_sequence_count=_or_else(config.max_num_seqs, lambda: 256),
        max_step_token_count=_or_else(config.max_num_batched_tokens, lambda: 8192),
        max_sequence_token_count=length,
        max_prompt_token_count=length,
    )
    model = SimulatedModel(
        name=_model_name(config),
        vocabulary_size=shape.vocabulary_size,
        limits=limits,
        block_count=config.simulate_block_count,
        block_size=config.block_size,
        architecture=shape.architecture,
        random_seed=config.seed,
        first_token=shape.first_token,
    )
    latency = SimulatedLatency(
        step=config.simulate_step_ms / 1e3,
        token=config.simulate_token_us / 1e6,
        row=config.simulate_row_us / 1e6,
        kilotoken=config.simulate_kilotoken_us / 1e6,
    )
    return SimulatedRunner(model, latency)


def _simulated_shape(config: WorkerConfig) -> _Shape:
    """That of the model, which must be on this machine, unless the vocabulary is given."""
    if config.simulate_vocabulary_size is not None:
        return _Shape(config.simulate_vocabulary_size, _DEFAULT_LENGTH, "Simulated")
    return _read_shape(models.resolve(config.model, weights=False))


def _read_shape(folder: Path) -> _Shape:
    reader = ConfigReader(read_config(folder))
    architectures = reader.words("architectures") or ("Simulated",)
    vocabulary_size = reader.integer("vocab_size")
    first_token = reader.integer(_FIRST_TOKEN_KEY, 0, minimum=0)
    if first_token >= vocabulary_size:
        raise reader.invalid(_FIRST_TOKEN_KEY, f"below vocab_size, {vocabulary_size}")
    return _Shape(
        vocabulary_size=vocabulary_size,
        length=reader.integer("max_position_embeddings", _DEFAULT_LENGTH),
        architecture=architectures[0],
        first_token=first_token,
    )


def _model_name(config: WorkerConfig) -> str:
    return as_text(config.served_model_name or config.model)


def _unless_auto(choice: str) -> str | None:
    return None if choice == "auto" else choice


def _or_else(value: int | None, default: Callable[[], int]) -> int:
    return default() if value is None else value
