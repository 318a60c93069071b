"""From settings to a runner: the real one, or the simulated. Runs on the device thread.

`check_start` and `refusal_of` ask the same code beforehand, and load nothing. torch is imported
lazily, by what the real runner needs, so a simulated worker never needs it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from twinplane import models
from twinplane.extras import Extra, how_to_get
from twinplane.models.folder import read_config
from twinplane.paths import as_text
from twinplane.settings.worker import WorkerConfig
from worker_service.device_errors import one_line
from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.capability import DataType, Limits, RankCoordinates
from worker_service.load_errors import LoadError
from worker_service.model.config import ConfigReader
from worker_service.model.registry import describe
from worker_service.ranks import RanksInvalid, rendezvous_host, resolve_ranks
from worker_service.runner.interface import Runner
from worker_service.runner.memory_plan import (
    bytes_of_rows,
    require,
    require_rows,
    this_machine,
)
from worker_service.runner.options import Quantization, RunnerOptions
from worker_service.simulated.runner import (
    SimulatedLatency,
    SimulatedModel,
    SimulatedRunner,
    simulated_pool_bytes,
)
from worker_service.threads import resolve_threads

_DEFAULT_LENGTH = 8_192
DEFAULT_ROWS: Mapping[str, int] = MappingProxyType({"cpu": 64, "cuda": 256})
"""Sequences at once, by the kind of device, where no setting says otherwise."""
DEFAULT_STEP_TOKENS: Mapping[str, int] = MappingProxyType({"cpu": 512, "cuda": 8192})
"""Tokens of one step, likewise."""
_STAND_IN: Mapping[str, object] = MappingProxyType(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 1024,
    }
)
# Where simulated ranks would meet, who have nothing to tell each other.
_NOBODYS_PORT = 1
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


def _ranks(config: WorkerConfig) -> RankCoordinates:
    """Which rank this worker is. Raises StartupError."""
    try:
        return resolve_ranks(config, os.environ, socket.gethostname())
    except RanksInvalid as error:
        raise StartupError(str(error)) from error


def _real_runner(config: WorkerConfig, progress: Callable[[str], None]) -> Runner:
    _import_torch()
    from worker_service.runner.load import check_load, load_runner

    progress("looking for the model")
    try:
        folder = models.resolve(config.model, convert=False)
    except models.NotConverted as unconverted:
        # What can't be loaded need not be converted, which may take minutes and gigabytes.
        check_load(_runner_options(config, Path(config.model), progress), unconverted.config)
        folder = models.resolve(config.model)
    return load_runner(_runner_options(config, folder, progress))


@dataclass(frozen=True, slots=True)
class StartCheck:
    """What a start would give, as one line for people, and for each executor why it can't run the
    model with these settings: None when it can. A simulated worker has no executors."""

    summary: str
    refusals: Mapping[str, str | None]


def check_start(config: WorkerConfig) -> StartCheck:
    """What `start_runner` would make of these settings, decided by its own code.

    Loads nothing, and leaves a GGUF file unconverted. Raises what `start_runner` raises before it
    reads the weights.
    """
    if config.simulate:
        length = _simulated_runner(config).capability().limits.max_sequence_token_count
        return StartCheck(f"simulated, sequences of up to {length:,} tokens", {})
    _import_torch()
    from worker_service.runner.load import check_load

    model: Mapping[str, object] | None = None
    try:
        folder = models.resolve(config.model, convert=False)
    except models.NotConverted as unconverted:
        folder, model = Path(config.model), unconverted.config
    plan = check_load(_runner_options(config, folder, lambda line: None), model)
    return StartCheck(plan.describe(), plan.refusals())


def check_without_model(config: WorkerConfig) -> StartCheck:
    """What can be said of the device and the executors while the model is not on this machine.

    A small model stands in for it. Raises as `check_start` does; the summary is empty.
    """
    _import_torch()
    from worker_service.runner.load import check_load

    small = replace(config, kv_cache_memory_bytes=1 << 24, block_size=16, max_model_len=None)
    plan = check_load(_runner_options(small, Path(), lambda line: None), _STAND_IN)
    return StartCheck("", plan.refusals())


def refusal_of(folder: Path) -> str | None:
    """Why a worker would not run the model whose config.json is in `folder`, None if it would."""
    try:
        describe(read_config(folder))
    except (LoadError, models.ModelError) as error:
        return str(error)
    return None


def _import_torch() -> None:
    """Raises StartupError where what a worker with a model needs can't be imported."""
    # Must be set before torch is imported. Otherwise its threads spin for milliseconds after each
    # operation, on cores that the control plane needs. Measured on two cores: with 10,000 spins a
    # step costs the same when nobody else uses the cores, and far less when they are shared.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        import worker_service.runner.load  # noqa: F401
    except ModuleNotFoundError as error:
        raise StartupError(
            f"a worker with a model needs the module {error.name}: "
            f"{how_to_get(Extra.WORKER)}; or start with --simulate"
        ) from error
    except (ImportError, OSError) as error:  # a library that torch needs is missing or broken
        raise StartupError(
            f"torch is installed and can't be imported: {' '.join(str(error).split())}"
        ) from error


def _runner_options(
    config: WorkerConfig, folder: Path, progress: Callable[[str], None]
) -> RunnerOptions:
    from worker_service.runner.device import available_device

    device = available_device() if config.device == "auto" else config.device
    return RunnerOptions(
        model_folder=folder,
        model_name=_model_name(config),
        device=device,
        data_type=None if config.dtype == "auto" else DataType(config.dtype),
        quantization=Quantization(config.quantization),
        kv_data_type=None if config.kv_cache_dtype == "auto" else DataType(config.kv_cache_dtype),
        block_size=config.block_size,
        kv_cache_bytes=config.kv_cache_memory_bytes,
        max_sequence_count=_or_else(config.max_num_seqs, lambda: DEFAULT_ROWS[device]),
        max_step_token_count=_or_else(
            config.max_num_batched_tokens, lambda: DEFAULT_STEP_TOKENS[device]
        ),
        max_sequence_token_count=config.max_model_len,
        executor=_unless_auto(config.executor),
        attention_backend=_unless_auto(config.attention_backend),
        thread_count=resolve_threads(config.threads, sharers=config.local_world_size).count,
        random_seed=config.seed,
        progress=progress,
        ranks=_ranks(config),
        rendezvous_host="127.0.0.1" if config.uds else config.host,
        rendezvous_port=config.rendezvous_port,
        rendezvous_name=rendezvous_host(config, os.environ),
        sharers=config.local_world_size,
        adapter_limits=_adapter_limits(config),
        weights_root=_weights_root(config),
    )


def _adapter_limits(config: WorkerConfig) -> AdapterLimits:
    return AdapterLimits(config.max_loras, config.max_lora_rank if config.max_loras else 0)


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
    ranks = _ranks(config)
    limits = Limits(
        max_sequence_count=_or_else(config.max_num_seqs, lambda: DEFAULT_ROWS["cuda"]),
        max_step_token_count=_or_else(
            config.max_num_batched_tokens, lambda: DEFAULT_STEP_TOKENS["cuda"]
        ),
        max_sequence_token_count=length,
        max_prompt_token_count=length,
        max_inflight_step_count=ranks.inflight_step_count,
    )
    host = this_machine()
    require_rows(bytes_of_rows(limits, config.block_size), host)
    require(
        "the simulated KV pool takes",
        simulated_pool_bytes(config.simulate_block_count, config.block_size),
        host,
        "give less by --simulate-block-count or --block-size",
    )
    address = f"{rendezvous_host(config, os.environ)}:{config.rendezvous_port or _NOBODYS_PORT}"
    model = SimulatedModel(
        name=_model_name(config),
        vocabulary_size=shape.vocabulary_size,
        limits=limits,
        block_count=config.simulate_block_count,
        block_size=config.block_size,
        architecture=shape.architecture,
        random_seed=config.seed,
        first_token=shape.first_token,
        ranks=ranks,
        rendezvous_address="" if ranks.rank or ranks.size == 1 else address,
        adapter_limits=_adapter_limits(config),
        weights_root=_weights_root(config),
    )
    latency = SimulatedLatency(
        step=config.simulate_step_ms / 1e3,
        token=config.simulate_token_us / 1e6,
        row=config.simulate_row_us / 1e6,
        kilotoken=config.simulate_kilotoken_us / 1e6,
    )
    try:
        return SimulatedRunner(model, latency)
    except MemoryError as error:  # the machine has it, and does not give it
        raise StartupError(
            f"this machine gives no memory for the simulation ({one_line(error)}): give less by "
            "--simulate-block-count, --block-size, --max-num-seqs or --max-model-len"
        ) from error


def _simulated_shape(config: WorkerConfig) -> _Shape:
    """That of the model, which must be on this machine, unless the vocabulary is given."""
    if config.simulate_vocabulary_size is not None:
        return _Shape(config.simulate_vocabulary_size, _DEFAULT_LENGTH, "Simulated")
    try:
        folder = models.resolve(config.model, weights=False, convert=False)
    except models.NotConverted as unconverted:  # nobody reads its weights
        return _read_shape(unconverted.config)
    return _read_shape(read_config(folder))


def _read_shape(config: Mapping[str, object]) -> _Shape:
    reader = ConfigReader(config)
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


def _weights_root(config: WorkerConfig) -> Path | None:
    """Below what updates may read. Raises StartupError where it is no folder."""
    if config.weights_root is None:
        return None
    root = Path(config.weights_root).expanduser()
    if not root.is_dir():
        raise StartupError(f"--weights-root {as_text(config.weights_root)} is not a folder")
    return root


def _model_name(config: WorkerConfig) -> str:
    return as_text(config.served_model_name or config.model)


def _unless_auto(choice: str) -> str | None:
    return None if choice == "auto" else choice


def _or_else(value: int | None, default: Callable[[], int]) -> int:
    return default() if value is None else value
