"""Other weights for workers that serve: what an update is, and what becomes of what runs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class InFlightPolicy(Enum):
    """What becomes of sequences that run when the weights of their replica are exchanged."""

    FINISH_ON_OLD = "finish-on-old"
    """They end with the old weights, there or on another replica; the exchange waits for them."""
    CONTINUE_ON_NEW = "continue-on-new"
    """They keep their tokens; their KV is computed again, with the new weights."""
    KEEP_KV = "keep-kv"
    """They keep tokens and KV, and their answers say so."""
    ABORT = "abort"
    """They end with an error that says why."""


class Placement(Enum):
    """Where prepared weights wait; see WeightsPlacement of the worker's contract."""

    AUTO = 0
    BESIDE = 1
    IN_PLACE = 2


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor without its numbers. `data_type` is float64, float32, bfloat16 or float16; `sha256`
    has 32 bytes, or none: not checked."""

    name: str
    data_type: str
    shape: tuple[int, ...]
    sha256: bytes = b""


@dataclass(frozen=True, slots=True)
class DiskSource:
    """A folder or GGUF file that the workers can read, below the folder that each allows."""

    path: str


@dataclass(frozen=True, slots=True)
class SpooledSource:
    """A safetensors file that the control plane keeps, and streams to each worker. `sha256` are
    digests of its tensors' bytes by their names; workers check those that are there."""

    path: str
    sha256: tuple[tuple[str, bytes], ...] = ()


@dataclass(frozen=True, slots=True)
class DistributedSource:
    """A torch.distributed group. The workers take the ranks from `first_rank` on. `backend` is
    gloo or nccl."""

    address: str
    world_size: int
    first_rank: int
    source_rank: int
    backend: str
    key: str
    tensors: tuple[TensorDescription, ...]
    bucket_bytes: int
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class SharedMemorySource:
    """Memory of the workers' host: a POSIX name, or a CUDA IPC handle with its GPU's UUID.
    `tensors` are (description, offset in bytes)."""

    byte_count: int
    tensors: tuple[tuple[TensorDescription, int], ...]
    posix_name: str = ""
    cuda_handle: bytes = b""
    cuda_device_uuid: str = ""


Source = DiskSource | SpooledSource | DistributedSource | SharedMemorySource


@dataclass(frozen=True, slots=True)
class WeightsUpdate:
    """What one worker is to prepare. `expected_digest` empty: not checked."""

    update_id: str
    source: Source
    is_partial: bool = False
    placement: Placement = Placement.AUTO
    expected_digest: str = ""


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """What a worker has prepared. `digest` is that of the weight version a commit makes."""

    update_id: str
    digest: str
    placement: Placement
    device_bytes: int
    host_bytes: int
