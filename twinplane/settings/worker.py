"""The worker's settings: flag > environment > TOML file > default. Values only."""

from __future__ import annotations

from dataclasses import dataclass

from twinplane.models import DEFAULT_MODEL, SIMULATED_MODEL
from twinplane.settings.ranges import (
    BYTES,
    COUNT,
    PORT,
    SECONDS,
    SEED,
    THREADS,
    NumberRange,
    require_ranges,
)
from twinplane.settings.resolution import option

DEFAULT_PORT = 50061

_MODEL = "model"
_LIMITS = "limits and memory"
_DEVICE = "device"
_RANKS = "ranks of a replica"
_SERVER = "server"
_PROCESS = "process"
_SIMULATION = "simulation"

_LENGTH = NumberRange(2, COUNT.maximum)  # a token of the prompt, and one of the output
# The null block and another; the control plane keeps account of each.
_SIMULATED_BLOCKS = NumberRange(2, 2**24)
_SIZE = NumberRange(1, 1024)
_RANK = NumberRange(0, 2**20)
_SLOTS = NumberRange(0, 4096)
_ADAPTER_RANK = NumberRange(1, 1024)
_LATENCY = NumberRange(0, 10**9)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """Settings of one worker process. None means: chosen at start, by what is found there."""

    model: str = option(
        "",  # __post_init__ puts a name in its place
        "model folder, .gguf file, catalogue name or hub id "
        f"(default: {DEFAULT_MODEL}; with --simulate: {SIMULATED_MODEL}, which needs no files)",
        group=_MODEL,
        path=True,
    )
    served_model_name: str | None = option(
        None,
        "name in logs and metrics; clients use the control plane's (default: the model as given)",
        group=_MODEL,
    )
    dtype: str = option(
        "auto",
        "number format of weights and KV; auto: float32 on a CPU, else the model's",
        group=_MODEL,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "none",
        "how weights are kept; int8: a quarter of the memory, compiled CPU kernels only",
        group=_MODEL,
        choices=("none", "int8"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of KV; auto: that of dtype; bfloat16 under float32: compiled kernels only",
        group=_MODEL,
        choices=("auto", "float32", "bfloat16"),
    )
    weights_root: str | None = option(
        None,
        "folder below which updates may read weights, and adapters be, while this worker serves "
        "(default: none, nothing is read from disk then)",
        group=_MODEL,
        path=True,
    )
    seed: int = option(
        0, "reported to controllers; sampling never depends on it", group=_MODEL, range=SEED
    )

    block_size: int = option(16, "tokens per KV block", group=_LIMITS, range=COUNT)
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the KV pool, such as 2GiB (default: 1GiB on a CPU, 85 % of a GPU's free rest)",
        group=_LIMITS,
        range=BYTES,
    )
    max_num_seqs: int | None = option(
        None,
        "maximum number of sequences at once (default: 64 on a CPU, else 256)",
        group=_LIMITS,
        range=COUNT,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of tokens in a step (default: 512 on a CPU, else 8192)",
        group=_LIMITS,
        range=COUNT,
    )
    max_model_len: int | None = option(
        None,
        "maximum length of a sequence, in tokens (default: the model's, or what the pool holds)",
        group=_LIMITS,
        range=_LENGTH,
    )

    max_loras: int = option(
        0,
        "LoRA adapters that the worker holds at once; their memory is kept free from the start",
        group=_LIMITS,
        range=_SLOTS,
    )
    max_lora_rank: int = option(
        16, "maximum rank of a LoRA adapter", group=_LIMITS, range=_ADAPTER_RANK
    )

    device: str = option(
        "auto", "what executes the steps", group=_DEVICE, choices=("auto", "cpu", "cuda")
    )
    executor: str = option(
        "auto",
        "what runs the model: compiled (a CPU in float32) or torch; auto: the first that can",
        group=_DEVICE,
        choices=("auto", "compiled", "torch"),
    )
    attention_backend: str = option(
        "auto",
        "what attends in the torch executor: torch or reference; auto: the first that can",
        group=_DEVICE,
    )
    threads: int | None = option(
        None,
        "CPU threads of the device (default: one for each core, within the container's CPU quota)",
        group=_DEVICE,
        range=THREADS,
    )

    tensor_parallel_size: int = option(
        1, "workers that share each layer, in one replica", group=_RANKS, range=_SIZE
    )
    pipeline_parallel_size: int = option(
        1,
        "stages of layers, each on workers of its own, in one replica",
        group=_RANKS,
        range=_SIZE,
    )
    data_parallel_size: int = option(
        1, "replicas; reported to controllers", group=_RANKS, range=_SIZE
    )
    rank: int | None = option(
        None,
        "place in the replica: pipeline rank x tensor-parallel size + tensor rank (default: "
        "LWS_WORKER_INDEX, or the ordinal of a Kubernetes StatefulSet's pod, else 0)",
        group=_RANKS,
        range=_RANK,
    )
    data_parallel_rank: int | None = option(
        None,
        "which replica this worker belongs to (default: by the pod's ordinal, else 0)",
        group=_RANKS,
        range=_RANK,
    )
    local_world_size: int = option(
        1,
        "workers on this machine: by default each has its share of the cores and, on a CPU, of the "
        "KV pool's size",
        group=_RANKS,
        range=_SIZE,
    )
    rendezvous_host: str | None = option(
        None,
        "host at which other ranks reach rank 0 (default: LWS_LEADER_ADDRESS, else the host at "
        "which the control plane reaches it)",
        group=_RANKS,
    )
    rendezvous_port: int = option(
        0, "port at which the ranks meet at rank 0; 0: any free one", group=_RANKS, range=PORT
    )

    host: str = option("127.0.0.1", "address to listen on", group=_SERVER)
    port: int = option(
        DEFAULT_PORT, "port to listen on; 0: any free one", group=_SERVER, range=PORT
    )
    uds: str | None = option(None, "Unix socket to listen on instead", group=_SERVER, path=True)
    metrics_host: str = option("127.0.0.1", "address of the metrics endpoint", group=_SERVER)
    metrics_port: int | None = option(
        None,
        "port of the metrics endpoint; 0: any free one (default: none, it is off)",
        group=_SERVER,
        range=PORT,
    )
    worker_id: str | None = option(
        None, "stable name of this worker (default: host name and address)", group=_SERVER
    )

    drain_seconds: float = option(
        30.0,
        "maximum seconds that a stopping worker serves the controller that holds it",
        group=_PROCESS,
        range=SECONDS,
    )
    exit_with_parent: bool = option(
        False, "stop when standard input ends, as it does with the parent", group=_PROCESS
    )
    log_level: str = option(
        "info",
        "minimum severity of log lines",
        group=_PROCESS,
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "auto",
        "how log lines look; auto: text on a terminal, else json",
        group=_PROCESS,
        choices=("auto", "text", "json"),
    )

    simulate: bool = option(
        False, "no model: deterministic tokens behind a latency model", group=_SIMULATION
    )
    simulate_vocabulary_size: int | None = option(
        None, "vocabulary (default: the model's)", group=_SIMULATION, range=COUNT
    )
    simulate_block_count: int = option(
        65536, "blocks of the KV pool", group=_SIMULATION, range=_SIMULATED_BLOCKS
    )
    simulate_step_ms: float = option(
        3.5, "milliseconds per step", group=_SIMULATION, range=_LATENCY
    )
    simulate_token_us: float = option(
        27.0, "microseconds per token", group=_SIMULATION, range=_LATENCY
    )
    simulate_row_us: float = option(
        0.0, "microseconds per sequence", group=_SIMULATION, range=_LATENCY
    )
    simulate_kilotoken_us: float = option(
        30.0, "microseconds per thousand attended tokens", group=_SIMULATION, range=_LATENCY
    )

    def __post_init__(self) -> None:
        """Names the default model. Raises ValueError, naming the setting, for what could never
        work."""
        if not self.model:
            model = SIMULATED_MODEL if self.simulate else DEFAULT_MODEL
            object.__setattr__(self, "model", model)
        elif self.model == SIMULATED_MODEL and not self.simulate:
            raise ValueError(f"model {SIMULATED_MODEL} has no weights: add --simulate")
        require_ranges(self)
