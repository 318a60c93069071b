"""From options to a warm runner: opens the folder, sizes the pool, chooses the executor, loads."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from twinplane.process.logs import fields
from worker_service.domain.capability import (
    Capability,
    DataType,
    Feature,
    LayerGroup,
    Limits,
    Model,
)
from worker_service.domain.plan import WeightVersion
from worker_service.load_errors import LoadError, MemoryBudgetTooSmall
from worker_service.model.accounting import account_for
from worker_service.model.adapters import adaptable_modules, adapter_numbers
from worker_service.model.memory import parameter_count
from worker_service.model.registry import describe
from worker_service.model.share import all_shares
from worker_service.model.spec import DecoderSpec
from worker_service.parallel.peers import Peers
from worker_service.runner.adapter_tensors import TensorSlots
from worker_service.runner.adapters import AdapterSlots
from worker_service.runner.arithmetic import arithmetic_name
from worker_service.runner.device import (
    default_kv_cache_bytes,
    describe_device,
    memory_of,
    open_device,
    own_device,
    smaller_formats,
)
from worker_service.runner.executor import ExecutorConfig, ExecutorMemory, ExecutorType
from worker_service.runner.kv_cache import KVCache, blocks_within, bytes_per_block, layer_groups
from worker_service.runner.memory_plan import MemoryPlan, bytes_of_rows, this_machine
from worker_service.runner.model_runner import ModelRunner
from worker_service.runner.options import Quantization, RunnerOptions
from worker_service.runner.selection import EXECUTORS, select_executor
from worker_service.runner.weight_store import LoadRecipe, WeightStore
from worker_service.weights.checkpoint import Checkpoint
from worker_service.weights.record import WeightsRecord, places_of
from worker_service.weights.sources.interface import no_check

_FEATURES = frozenset({Feature.HELD_SAMPLING, Feature.WEIGHT_UPDATES, Feature.SLEEP})

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LoadPlan:
    """What a load will do: everything that is decided before the weights are read."""

    executor: ExecutorType
    config: ExecutorConfig
    layer_groups: tuple[LayerGroup, ...]
    block_count: int
    memory: MemoryPlan

    def describe(self) -> str:
        """One line for people: the model, what computes it where, its format and its room."""
        config, spec = self.config, self.config.spec
        weights = str(config.data_type).removeprefix("torch.")
        if config.quantization is not Quantization.NONE:
            weights = f"{config.quantization.value} weights"
        tokens = (self.block_count - 1) * config.block_size
        ranks = config.ranks
        part = f" (rank {ranks.rank} of {ranks.size})" if ranks.size > 1 else ""
        return (
            f"{spec.architecture}, {len(spec.layers)} layers{part}, {weights}, by {self.executor} "
            f"on {config.device}; {tokens:,} KV tokens, "
            f"sequences of up to {config.limits.max_sequence_token_count:,} tokens; "
            f"{self.memory.describe()}"
        )

    def refusals(self) -> dict[str, str | None]:
        """For each executor why it can't run this, None when it can."""
        return {str(kind): kind.probe(self.config) for kind in EXECUTORS}

    def make_cache(self) -> KVCache:
        """The KV pool. Raises KVPoolTooLarge."""
        config = self.config
        return KVCache(self.layer_groups, self.block_count, config.block_size, config.device)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model, or a rank's part of one, that can run steps, what it can do, its KV pool, and the
    plan of its memory."""

    capability: Capability
    weights: WeightStore
    cache: KVCache
    device: torch.device
    memory: MemoryPlan
    adapters: AdapterSlots
    peers: Peers | None = None


def load_runner(options: RunnerOptions) -> ModelRunner:
    """Loads the model and warms it up. Call it on the thread that will own the device.

    Raises LoadError, whose message says what to do, when the options cannot be met.
    """
    loaded = load_model(options)
    with loaded.memory.explained():
        runner = ModelRunner(
            loaded.capability,
            loaded.weights,
            loaded.cache,
            loaded.device,
            loaded.peers,
            loaded.adapters,
        )
        options.progress("warming up")
        runner.warm_up()
    return runner


def load_model(options: RunnerOptions) -> LoadedModel:
    """The model without a runner. Raises LoadError."""
    device = open_device(options.device)
    own_device(device)
    options.progress(f"opening {options.model_folder}")
    with torch.inference_mode(), Checkpoint(options.model_folder) as checkpoint:
        described = describe(checkpoint.config)
        spec = account_for(checkpoint, described)
        plan = plan_load(options, spec, device)
        chosen, config = plan.executor, plan.config
        _log_memory(plan)
        # Before the digest, which reads all weights.
        address = _host_store(options, config.peers)
        with plan.memory.explained():
            cache = plan.make_cache()
        _set_torch_threads(1 if chosen.has_own_threads else options.thread_count)
        options.progress("checking the weights' digest")
        data_type = DataType(str(config.data_type).removeprefix("torch."))
        record = _record(checkpoint, spec)
        recipe = LoadRecipe(
            executor=chosen,
            config=config,
            cache=cache,
            plan=plan.memory,
            described=described,
            version_digest=_version_digest(options.quantization, data_type, config.kv_data_type),
            memory=lambda: (memory_of(device), this_machine()),
            root=options.weights_root,
        )
        executor = recipe.load(checkpoint, report=options.progress)
    return LoadedModel(
        capability=Capability(
            device=describe_device(device),
            model=Model(options.model_name, spec.architecture, spec.vocabulary_size, data_type),
            weight_version=WeightVersion(1, recipe.version_digest(record.digest)),
            limits=config.limits,
            features=_FEATURES | chosen.features,
            executor=chosen.name,
            attention_backend=chosen.attention_backend or chosen.name,
            random_seed=options.random_seed,
            ranks=options.ranks,
            arithmetic=arithmetic_name(device, chosen, executor, options.ranks),
            rendezvous_address=address,
            adapter_slot_count=config.adapter_limits.slot_count,
            max_adapter_rank=config.adapter_limits.max_rank,
        ),
        weights=WeightStore(recipe, record, executor),
        cache=cache,
        device=device,
        memory=plan.memory,
        adapters=_adapter_slots(config),
        peers=config.peers,
    )


def _adapter_slots(config: ExecutorConfig) -> AdapterSlots:
    memory = None if config.adapters is None else TensorSlots(config.adapters)
    return AdapterSlots(config.adapter_limits, adaptable_modules(config.spec), memory)


def _record(checkpoint: Checkpoint, spec: DecoderSpec) -> WeightsRecord:
    """Reads all weights, unless their digests are remembered."""
    names = {tensor.name for tensor in spec.tensors()}
    places = places_of(checkpoint, names)
    return WeightsRecord(checkpoint.config_bytes(), checkpoint.describe(names, no_check), places)


def _host_store(options: RunnerOptions, peers: Peers | None) -> str:
    """Where the other ranks of the first one come; empty for any other. Raises
    RendezvousUnavailable."""
    if peers is None or options.ranks.rank != 0:
        return ""
    address = peers.host_store(options.rendezvous_host, options.rendezvous_port)
    if options.rendezvous_name is None:
        return address
    return f"{options.rendezvous_name}:{address.rpartition(':')[2]}"


def check_load(options: RunnerOptions, config: Mapping[str, Any] | None = None) -> LoadPlan:
    """What `load_runner` would do, decided by its own code. Reads no weights, and keeps nothing.

    `config` is the config.json of a model whose folder is still to be made. Raises each LoadError
    that `load_runner` raises before it reads the weights.
    """
    device = open_device(options.device)
    if config is not None:
        spec = describe(config)
    else:
        with torch.inference_mode(), Checkpoint(options.model_folder) as checkpoint:
            spec = account_for(checkpoint, describe(checkpoint.config))
    plan = plan_load(options, spec, device)
    with torch.inference_mode():
        plan.make_cache()
    return plan


def plan_load(options: RunnerOptions, spec: DecoderSpec, device: torch.device) -> LoadPlan:
    """Sizes the pool and chooses the executor. Raises LoadError for options that cannot be met."""
    data_type = options.data_type or _default_data_type(spec, device)
    torch_type: torch.dtype = getattr(torch, data_type.value)
    kv_data_type = options.kv_data_type or data_type
    shares = {share.coordinates: share for share in all_shares(spec, options.ranks)}
    groups = {each: layer_groups(share, kv_data_type) for each, share in shares.items()}
    budget = options.kv_cache_bytes
    if budget is None:
        own_share = shares[options.ranks]
        numbers = parameter_count(own_share) + adapter_numbers(own_share, options.adapter_limits)
        weights_bytes = numbers * torch_type.itemsize
        budget = default_kv_cache_bytes(device, data_type, weights_bytes, options.sharers)
    # Every rank of a replica has the same blocks, so those with more heads or layers decide.
    widest = max(groups.values(), key=lambda each: bytes_per_block(each, options.block_size))
    block_count = blocks_within(budget, widest, options.block_size)
    config = ExecutorConfig(
        spec=spec,
        device=device,
        data_type=torch_type,
        quantization=options.quantization,
        kv_data_type=kv_data_type,
        block_size=options.block_size,
        limits=_limits(options, spec, block_count),
        thread_count=options.thread_count,
        progress=options.progress,
        peers=Peers(options.ranks, device) if options.ranks.size > 1 else None,
        adapter_limits=options.adapter_limits,
    )
    chosen = select_executor(config, options.executor, options.attention_backend)
    if options.adapter_limits.slot_count:
        config = replace(config, adapters=chosen.adapters(config))
    own = groups[options.ranks]
    kv_bytes = block_count * bytes_per_block(own, options.block_size)
    memory = plan_memory(config, chosen.memory(config), kv_bytes)
    memory.require_room()
    return LoadPlan(chosen, config, own, block_count, memory)


def plan_memory(config: ExecutorConfig, taken: ExecutorMemory, kv_bytes: int) -> MemoryPlan:
    """What a load with an executor that takes so much beside the KV pool will take in all."""
    quantization, format_name = config.quantization, str(config.data_type).removeprefix("torch.")
    return MemoryPlan(
        device=memory_of(config.device),
        host=this_machine(),
        weights_bytes=taken.weights_bytes,
        kv_bytes=kv_bytes,
        workspace_bytes=taken.workspace_bytes,
        rows_bytes=bytes_of_rows(config.limits, config.block_size),
        number_format=format_name if quantization is Quantization.NONE else quantization.value,
        smaller_formats=smaller_formats(config.device, config.data_type, quantization),
        adapters_bytes=0 if config.adapters is None else config.adapters.byte_count,
    )


def _log_memory(plan: LoadPlan) -> None:
    """One line before anything big is read. A host can lack memory that its KV pool needs only when
    it fills."""
    memory = plan.memory
    message, level = "memory plan", logging.INFO
    if memory.missing_bytes:
        message, level = "memory plan exceeds what is free", logging.WARNING
    _logger.log(
        level,
        message,
        extra=fields(
            weights_bytes=memory.weights_bytes,
            kv_bytes=memory.kv_bytes,
            workspace_bytes=memory.workspace_bytes,
            rows_bytes=memory.rows_bytes,
            adapters_bytes=memory.adapters_bytes,
            free_bytes=memory.device.free_bytes,
            total_bytes=memory.device.total_bytes,
        ),
    )


def _set_torch_threads(count: int) -> None:
    """Sets torch's number of threads for the whole process. Our code never reads that number.

    Beside an executor with threads of its own, torch only copies and samples, and gets one thread.
    More of them would spin, while they wait, on cores that the executor needs: loading would take
    ten times as long, and a step's few rows would gain nothing.
    """
    torch.set_num_threads(count)


def _default_data_type(spec: DecoderSpec, device: torch.device) -> DataType:
    if device.type == "cpu":
        return DataType.FLOAT32
    return spec.data_type or DataType.BFLOAT16


def _version_digest(
    quantization: Quantization, data_type: DataType, kv_data_type: DataType
) -> Callable[[str], str]:
    """Makes a weight version's digest of that of the content: the same one; where a setting changes
    the arithmetic from float32, one of both.

    So a sequence never goes on under other arithmetic than it began with.
    """
    settings = []
    if data_type is not DataType.FLOAT32:
        settings.append(f"dtype={data_type.value}")
    if quantization is not Quantization.NONE:
        settings.append(f"quantization={quantization.value}")
    if kv_data_type is not data_type:
        settings.append(f"kv_cache_dtype={kv_data_type.value}")

    def digest_of(content: str) -> str:
        if not settings:
            return content
        return hashlib.sha256("\0".join((content, *settings)).encode()).hexdigest()

    return digest_of


def _limits(options: RunnerOptions, spec: DecoderSpec, block_count: int) -> Limits:
    """Bounds that the model and the pool can keep: a sequence that runs alone always fits."""
    capacity = (block_count - 1) * options.block_size
    wanted = options.max_sequence_token_count
    if wanted is None:
        length = min(spec.max_length, capacity)
        if length < spec.max_length:
            options.progress(
                f"sequences are limited to {length} tokens: the KV pool holds no more, the model "
                f"could take {spec.max_length}"
            )
    elif wanted > spec.max_length:
        raise LoadError(
            f"sequences of {wanted} tokens were asked for; the model takes {spec.max_length}: give "
            "less by --max-model-len"
        )
    elif wanted > capacity:
        raise MemoryBudgetTooSmall(
            f"sequences of {wanted} tokens were asked for; the KV pool holds {capacity} "
            "tokens: give less by --max-model-len, or more by --kv-cache-memory-bytes"
        )
    else:
        length = wanted
    return Limits(
        max_sequence_count=options.max_sequence_count,
        max_step_token_count=options.max_step_token_count,
        max_sequence_token_count=length,
        max_prompt_token_count=length,
        max_inflight_step_count=options.ranks.inflight_step_count,
    )
