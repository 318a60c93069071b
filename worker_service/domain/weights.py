"""Other weights for a worker that serves: what an update is, and what becomes of it. Values only.

protos/twinplane/worker/v1/weights.proto says what they mean. Numbers have safetensors' names for
their formats: F32, BF16, F16, F64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from worker_service.domain.plan import WeightVersion

NUMBER_BYTES: Mapping[str, int] = MappingProxyType({"F32": 4, "BF16": 2, "F16": 2, "F64": 8})
"""Bytes of a number, by each format that is read."""


class Target(Enum):
    """Which of a worker's models an update is for."""

    MODEL = 1
    DRAFT = 2


class Placement(Enum):
    """Where prepared weights wait for their commit. AUTO is only asked for, never answered."""

    AUTO = 0
    BESIDE = 1
    IN_PLACE = 2


class SleepTag(Enum):
    """What a sleeping worker does without; the values are for people."""

    WEIGHTS = "its weights"
    KV = "its KV pool"


@dataclass(frozen=True, slots=True)
class TensorDescription:
    """A tensor without its numbers. `sha256` has 32 bytes; empty in a request: not checked."""

    name: str
    number_format: str
    shape: tuple[int, ...]
    sha256: bytes = b""

    @property
    def byte_count(self) -> int:
        """What its numbers take. The format is one of NUMBER_BYTES."""
        return math.prod(self.shape) * NUMBER_BYTES[self.number_format]


@dataclass(frozen=True, slots=True)
class DiskSource:
    """A model folder or a GGUF file below the folder that the worker's operator allows."""

    path: str


@dataclass(frozen=True, slots=True)
class StreamSource:
    """Tensors whose bytes come as chunks, in this order."""

    tensors: tuple[TensorDescription, ...]


class GroupBackend(Enum):
    """How the members of a group talk. The values are for people."""

    GLOO = "Gloo"
    NCCL = "NCCL"


@dataclass(frozen=True, slots=True)
class DistributedSource:
    """Tensors that a member of a torch.distributed group broadcasts, in this order.

    The group's store listens at `host`:`port`; `key` names the group there. `bucket_bytes` 0: each
    tensor is a bucket. `timeout_seconds`: how long the others may let this worker wait.
    """

    host: str
    port: int
    world_size: int
    rank: int
    source_rank: int
    backend: GroupBackend
    key: str
    tensors: tuple[TensorDescription, ...]
    bucket_bytes: int = 0
    timeout_seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class PosixMemory:
    """POSIX shared memory of this host; the name with its leading slash."""

    name: str


@dataclass(frozen=True, slots=True)
class CudaMemory:
    """Memory of this worker's GPU that another process has. The handle has 64 bytes."""

    handle: bytes
    device_uuid: str


@dataclass(frozen=True, slots=True)
class IpcSource:
    """Tensors in `byte_count` bytes of memory that another process shares, each from its offset
    on."""

    memory: PosixMemory | CudaMemory
    byte_count: int
    tensors: tuple[TensorDescription, ...]
    offsets: tuple[int, ...]


Source = DiskSource | StreamSource | DistributedSource | IpcSource


@dataclass(frozen=True, slots=True)
class WeightsUpdate:
    """What is to be prepared. `expected_digest` empty: not checked."""

    update_id: str
    source: Source
    target: Target = Target.MODEL
    is_partial: bool = False
    placement: Placement = Placement.AUTO
    expected_digest: str = ""


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """Bytes of a streamed tensor, from `offset` on."""

    tensor_index: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """What waits for a commit. `digest` is that of the weight version that the commit makes."""

    update_id: str
    digest: str
    placement: Placement
    device_bytes: int
    host_bytes: int


@dataclass(frozen=True, slots=True)
class CommittedWeights:
    """What plans are to expect from now on, and for how long no step could run."""

    version: WeightVersion
    paused_seconds: float


class UpdateOutcome(Enum):
    """How an update, or its preparation, ended."""

    COMMITTED = "committed"
    REFUSED = "refused"
    """It did not fit, or its source or memory was not there."""
    ABORTED = "aborted"
    FAILED = "failed"
    """The commit failed."""
