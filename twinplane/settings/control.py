"""The control plane's settings: names, defaults and meanings. Resolved once, by the entry point."""

from __future__ import annotations

from dataclasses import dataclass

from twinplane.models import DEFAULT_MODEL, SIMULATED_MODEL
from twinplane.settings.addresses import parse_named, parse_replicas
from twinplane.settings.ranges import (
    COUNT,
    PATIENCE,
    PORT,
    SECONDS,
    SEED,
    THREADS,
    NumberRange,
    require_ranges,
)
from twinplane.settings.resolution import option

_MODEL = "model"
_LISTEN = "where to listen"
_WORKER = "worker"
_SCHEDULING = "scheduling"
_OPERATION = "operation"

DEFAULT_WORKER = "127.0.0.1:50061"
USUAL_ADMIN_PORT = 50071
DEFAULT_ADMIN_ADDRESS = f"127.0.0.1:{USUAL_ADMIN_PORT}"
"""Where operators look for the port, which is off unless it is asked for."""
_LENGTH = NumberRange(2, COUNT.maximum)  # a token of the prompt, and one of the output


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """What an operator can choose. None means: what the worker can do, or what the model says."""

    model: str = option(
        DEFAULT_MODEL,
        f"model folder, .gguf file, catalogue name or hub id; {SIMULATED_MODEL}: the built-in one, "
        "the default with --simulate",
        group=_MODEL,
        path=True,
    )
    served_model_name: str | None = option(
        None, "name that clients use; default: the model's", group=_MODEL
    )
    max_model_len: int | None = option(
        None,
        "maximum length of a sequence in tokens, prompt and output; default: the worker's",
        group=_MODEL,
        range=_LENGTH,
    )
    generation_config: str = option(
        "auto",
        "where unset sampling parameters come from; auto: the model's files; none: temperature 1",
        group=_MODEL,
        choices=("auto", "none"),
    )
    tokenizer_threads: int = option(
        2, "threads for tokenizing and chat templates", group=_MODEL, range=THREADS
    )

    trust_message_special_tokens: bool = option(
        False, "special tokens written in chat messages are those tokens, not text", group=_MODEL
    )

    host: str = option("127.0.0.1", "address to listen on", group=_LISTEN)
    port: int = option(50051, "port to listen on; 0: any free one", group=_LISTEN, range=PORT)
    uds: str | None = option(
        None, "Unix socket to listen on instead of host and port", group=_LISTEN, path=True
    )
    metrics_host: str = option("127.0.0.1", "address of the metrics endpoint", group=_LISTEN)
    metrics_port: int | None = option(
        9400, "port of the metrics endpoint; 0: any free one; none: off", group=_LISTEN, range=PORT
    )

    admin_host: str = option(
        "127.0.0.1",
        "address of the operators' port; whoever reaches it decides what all clients are answered "
        "with",
        group=_LISTEN,
    )
    admin_port: int | None = option(
        None,
        "port for operators, with twinplane.control.v1.ControlService; 0: any free one; default: "
        "none, it is off",
        group=_LISTEN,
        range=PORT,
    )

    worker: str | None = option(
        None,
        "a worker: host:port or unix:PATH, of a replica's ranks all with commas between; may be "
        f"repeated, for each replica once; default: {DEFAULT_WORKER}, unless another setting says "
        "where workers are",
        group=_WORKER,
        repeated=True,
    )
    workers_file: str | None = option(
        None,
        "file that lists workers, a replica or a rank on each line; read again and again",
        group=_WORKER,
        path=True,
    )
    workers_dns: str | None = option(
        None,
        "host:port whose name resolves to the addresses of all workers, ranks too, as that of a "
        "headless Kubernetes service; resolved again and again",
        group=_WORKER,
    )
    workers_refresh_seconds: float = option(
        5.0,
        "seconds between two looks at --workers-file or --workers-dns",
        group=_WORKER,
        range=PATIENCE,
    )
    worker_loss_patience: float = option(
        60.0,
        "maximum seconds to wait for a lost worker before requests fail",
        group=_WORKER,
        range=PATIENCE,
    )
    arithmetic_change: str = option(
        "end",
        "generations with tokens whose worker comes back rounding differently end, or continue",
        group=_WORKER,
        choices=("end", "continue"),
    )

    max_num_seqs: int | None = option(
        None,
        "maximum number of sequences at once; default: the worker's",
        group=_SCHEDULING,
        range=COUNT,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of tokens in a step; default: the worker's",
        group=_SCHEDULING,
        range=COUNT,
    )
    max_num_waiting: int = option(
        1024, "maximum number of waiting requests; more are refused", group=_SCHEDULING, range=COUNT
    )
    enable_prefix_caching: bool = option(
        True, "reuse the KV of prompts that begin alike", group=_SCHEDULING
    )
    async_scheduling: bool = option(
        True,
        "plan the next step while one runs; without it, pipeline stages work one at a time",
        group=_SCHEDULING,
    )
    ageing_seconds: float = option(
        10.0,
        "seconds of waiting that are worth one priority level",
        group=_SCHEDULING,
        range=PATIENCE,
    )
    seed: int | None = option(
        None, "makes the seeds of requests without one repeatable", group=_SCHEDULING, range=SEED
    )

    drain_grace_seconds: float = option(
        30.0,
        "maximum seconds that running requests have when the server stops",
        group=_OPERATION,
        range=SECONDS,
    )
    state_dir: str | None = option(
        None,
        "folder in which rollouts are written down, to go on with after a restart; default: none, "
        "they are kept in memory",
        group=_OPERATION,
        path=True,
    )
    log_level: str = option(
        "info",
        "minimum severity of log lines",
        group=_OPERATION,
        choices=("debug", "info", "warning", "error"),
    )
    log_format: str = option(
        "auto",
        "how log lines look; auto: text on a terminal, else json",
        group=_OPERATION,
        choices=("auto", "json", "text"),
    )
    exit_with_parent: bool = option(
        False, "stop when standard input reaches its end", group=_OPERATION
    )

    def __post_init__(self) -> None:
        """Raises ValueError, naming the setting."""
        require_ranges(self)
        if self.worker is not None:
            replicas = parse_replicas(self.worker.split() or [self.worker])
            object.__setattr__(self, "worker", " ".join(replicas))
        if self.workers_file == "":
            raise ValueError("workers_file must be a path, not ''")
        if self.workers_dns is not None:
            parse_named(self.workers_dns)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Each replica that settings name by address; the ranks of one with commas between."""
        if self.worker is not None:
            return tuple(self.worker.split())
        return () if self.workers_file or self.workers_dns else (DEFAULT_WORKER,)
