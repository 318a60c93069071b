"""What a ModelRunner is loaded from. No torch, so that the application can name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.capability import DataType, RankCoordinates


class Quantization(Enum):
    """How projections' weights are kept; the value is the setting's."""

    NONE = "none"
    INT8 = "int8"


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Resolved settings of one worker's runner.

    `device` is "cpu" or "cuda". `data_type` None takes float32 on the CPU and the model's own
    format elsewhere. `kv_cache_bytes` bounds the KV pool; None takes the device's default.
    `max_sequence_token_count` None takes the model's own length, or what the pool holds if that is
    less. `executor` and `attention_backend` None take the first that can run. `thread_count` is for
    computing on the CPU. `random_seed` is reported, never used for sampling. `kv_data_type` None
    takes that of `data_type`. It and `quantization` are refused where they cannot be honoured.
    `progress` gets short lines that tell people what is being done. `ranks` is the worker's place
    in its replica; the first of several ranks lets the others meet at
    `rendezvous_host`:`rendezvous_port`, 0 for any free port. `rendezvous_name` is the host that it
    tells: empty leaves that to who asks, None is the host. `sharers`: workers on this machine.
    Below `weights_root` updates may read weights; None: nowhere. `adapter_limits`: the slots that
    memory is kept for.
    """

    model_folder: Path
    model_name: str
    device: str
    data_type: DataType | None
    block_size: int
    kv_cache_bytes: int | None
    max_sequence_count: int
    max_step_token_count: int
    max_sequence_token_count: int | None
    executor: str | None
    attention_backend: str | None
    thread_count: int
    random_seed: int
    progress: Callable[[str], None]
    quantization: Quantization = Quantization.NONE
    kv_data_type: DataType | None = None
    ranks: RankCoordinates = field(default_factory=RankCoordinates)
    rendezvous_host: str = "127.0.0.1"
    rendezvous_port: int = 0
    rendezvous_name: str | None = None
    sharers: int = 1
    adapter_limits: AdapterLimits = field(default_factory=AdapterLimits)
    weights_root: Path | None = None
