"""The worker's settings: flag > environment > TOML file > default. Values only."""

from __future__ import annotations

import math
from dataclasses import dataclass

from twinplane.models import DEFAULT_MODEL, SIMULATED_MODEL
from twinplane.settings.resolution import option

DEFAULT_PORT = 50061

_MODEL = "model"
_LIMITS = "limits and memory"
_DEVICE = "device"
_RANKS = "ranks of a replica"
_SERVER = "server"
_PROCESS = "process"
_SIMULATION = "simulation"


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
        "number format of weights and KV (auto: float32 on a CPU, else the model's own)",
        group=_MODEL,
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str = option(
        "none",
        "how weights are kept (int8: a quarter of the memory, compiled CPU kernels only)",
        group=_MODEL,
        choices=("none", "int8"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "number format of KV (auto: that of dtype; bfloat16 under float32: compiled kernels only)",
        group=_MODEL,
        choices=("auto", "float32", "bfloat16"),
    )
    seed: int = option(0, "reported to controllers; sampling never depends on it", group=_MODEL)

    block_size: int = option(16, "tokens per KV block", group=_LIMITS)
    kv_cache_memory_bytes: int | None = option(
        None,
        "size of the KV pool, such as 2GiB (default: 1GiB on a CPU, 85 % of a GPU's free rest)",
        group=_LIMITS,
    )
    max_num_seqs: int | None = option(
        None, "maximum number of sequences at once (default: 64 on a CPU, else 256)", group=_LIMITS
    )
    max_num_batched_tokens: int | None = option(
        None, "maximum number of tokens in a step (default: 512 on a CPU, else 8192)", group=_LIMITS
    )
    max_model_len: int | None = option(
        None,
        "maximum length of a sequence, in tokens (default: the model's, or what the pool holds)",
        group=_LIMITS,
    )

    device: str = option(
        "auto", "what executes the steps", group=_DEVICE, choices=("auto", "cpu", "cuda")
    )
    executor: str = option(
        "auto",
        "what runs the model: compiled (a CPU in float32) or torch (auto: the first that can)",
        group=_DEVICE,
        choices=("auto", "compiled", "torch"),
    )
    attention_backend: str = option(
        "auto",
        "what attends in the torch executor: torch or reference (auto: the first that can)",
        group=_DEVICE,
    )
    threads: int | None = option(
        None,
        "CPU threads of the device (default: one for each core, within the container's CPU quota)",
        group=_DEVICE,
    )

    tensor_parallel_size: int = option(
        1, "workers that share each layer, in one replica", group=_RANKS
    )
    pipeline_parallel_size: int = option(
        1, "stages of layers, each on workers of its own, in one replica", group=_RANKS
    )
    data_parallel_size: int = option(1, "replicas; reported to controllers", group=_RANKS)
    rank: int | None = option(
        None,
        "place in the replica: pipeline rank x tensor-parallel size + tensor rank (default: "
        "LWS_WORKER_INDEX, or the ordinal of a Kubernetes StatefulSet's pod, else 0)",
        group=_RANKS,
    )
    data_parallel_rank: int | None = option(
        None,
        "which replica this worker belongs to (default: by the pod's ordinal, else 0)",
        group=_RANKS,
    )
    local_world_size: int = option(
        1,
        "workers on this machine: by default each has its share of the cores and, on a CPU, of the "
        "KV pool's size",
        group=_RANKS,
    )
    rendezvous_host: str | None = option(
        None,
        "host at which other ranks reach rank 0 (default: LWS_LEADER_ADDRESS, else the host at "
        "which the control plane reaches it)",
        group=_RANKS,
    )
    rendezvous_port: int = option(
        0, "port at which the ranks meet at rank 0; 0: any free one", group=_RANKS
    )

    host: str = option("127.0.0.1", "address to listen on", group=_SERVER)
    port: int = option(DEFAULT_PORT, "port to listen on; 0: any free one", group=_SERVER)
    uds: str | None = option(None, "Unix socket to listen on instead", group=_SERVER, path=True)
    metrics_host: str = option("127.0.0.1", "address of the metrics endpoint", group=_SERVER)
    metrics_port: int | None = option(
        None,
        "port of the metrics endpoint; 0: any free one (default: none, it is off)",
        group=_SERVER,
    )
    worker_id: str | None = option(
        None, "stable name of this worker (default: host name and address)", group=_SERVER
    )

    drain_seconds: float = option(
        30.0,
        "maximum seconds that a stopping worker serves the controller that holds it",
        group=_PROCESS,
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
        "log lines for people or machines (auto: people on a terminal)",
        group=_PROCESS,
        choices=("auto", "text", "json"),
    )

    simulate: bool = option(
        False, "no model: deterministic tokens behind a latency model", group=_SIMULATION
    )
    simulate_vocabulary_size: int | None = option(
        None, "vocabulary (default: the model's)", group=_SIMULATION
    )
    simulate_block_count: int = option(65536, "blocks of the KV pool", group=_SIMULATION)
    simulate_step_ms: float = option(3.5, "milliseconds per step", group=_SIMULATION)
    simulate_token_us: float = option(27.0, "microseconds per token", group=_SIMULATION)
    simulate_row_us: float = option(0.0, "microseconds per sequence", group=_SIMULATION)
    simulate_kilotoken_us: float = option(
        30.0, "microseconds per thousand attended tokens", group=_SIMULATION
    )

    def __post_init__(self) -> None:
        """Names the default model. Raises ValueError, naming the setting, for what could never
        work."""
        if not self.model:
            model = SIMULATED_MODEL if self.simulate else DEFAULT_MODEL
            object.__setattr__(self, "model", model)
        elif self.model == SIMULATED_MODEL and not self.simulate:
            raise ValueError(f"model {SIMULATED_MODEL} has no weights: add --simulate")
        for name, minimum in _MINIMUMS:
            value = getattr(self, name)
            if value is not None and not minimum <= value < math.inf:
                raise ValueError(f"{name} must be at least {minimum}, not {value}")
        for name in ("port", "metrics_port", "rendezvous_port"):
            port = getattr(self, name)
            if port is not None and port > 65535:
                raise ValueError(f"{name} must be at most 65535, not {port}")
        for name, count in (
            ("rank", self.tensor_parallel_size * self.pipeline_parallel_size),
            ("data_parallel_rank", self.data_parallel_size),
        ):
            rank = getattr(self, name)
            if rank is not None and rank >= count:
                raise ValueError(f"{name} is {rank}, and there are {count}: they count from 0")


_MINIMUMS = (
    ("seed", 0),
    ("block_size", 1),
    ("kv_cache_memory_bytes", 1),
    ("max_num_seqs", 1),
    ("max_num_batched_tokens", 1),
    ("max_model_len", 2),
    ("threads", 1),
    ("tensor_parallel_size", 1),
    ("pipeline_parallel_size", 1),
    ("data_parallel_size", 1),
    ("local_world_size", 1),
    ("rank", 0),
    ("data_parallel_rank", 0),
    ("rendezvous_port", 0),
    ("port", 0),
    ("metrics_port", 0),
    ("drain_seconds", 0),
    ("simulate_vocabulary_size", 1),
    ("simulate_block_count", 2),
    ("simulate_step_ms", 0),
    ("simulate_token_us", 0),
    ("simulate_row_us", 0),
    ("simulate_kilotoken_us", 0),
)
