"""What a worker can do and what its memory holds. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from worker_service.domain.plan import WeightVersion


class DeviceKind(Enum):
    """What executes the steps."""

    CPU = 1
    CUDA = 2
    SIMULATED = 3


class DataType(Enum):
    """Formats of weights and KV; the value is torch's name."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Feature(Enum):
    """Promises and offers beyond the basic step."""

    HELD_SAMPLING = 1
    BATCH_INVARIANT = 2
    DRAFT_VERIFICATION = 3
    WEIGHT_UPDATES = 4
    SLEEP = 5


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds a plan must keep."""

    max_sequence_count: int
    max_step_token_count: int
    max_sequence_token_count: int
    max_prompt_token_count: int
    max_inflight_step_count: int = 4


@dataclass(frozen=True, slots=True)
class Device:
    """The device a worker owns."""

    kind: DeviceKind
    name: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class RankCoordinates:
    """(rank, size) of each kind of parallelism.

    The ranks of a replica are those of all its tensor and pipeline ranks, numbered stage by stage.
    `data` tells replicas apart, and ranks of different replicas never talk to each other.
    """

    tensor: tuple[int, int] = (0, 1)
    pipeline: tuple[int, int] = (0, 1)
    data: tuple[int, int] = (0, 1)

    @property
    def rank(self) -> int:
        """The place among the replica's ranks."""
        return self.pipeline[0] * self.tensor[1] + self.tensor[0]

    @property
    def size(self) -> int:
        """How many ranks the replica has."""
        return self.tensor[1] * self.pipeline[1]

    @property
    def inflight_step_count(self) -> int:
        """Plans that this place accepts ahead of their results: one for each stage, and the next;
        four at least."""
        return max(4, self.pipeline[1] + 1)

    @property
    def is_first_stage(self) -> bool:
        return self.pipeline[0] == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pipeline[0] == self.pipeline[1] - 1

    @property
    def answering_rank(self) -> int:
        """The rank that samples: the first of the last stage."""
        return (self.pipeline[1] - 1) * self.tensor[1]

    @property
    def answers(self) -> bool:
        """Whether this is the rank that samples, and answers with tokens."""
        return self.rank == self.answering_rank


@dataclass(frozen=True, slots=True)
class Model:
    """What was loaded."""

    name: str
    architecture: str
    vocabulary_size: int
    data_type: DataType


@dataclass(frozen=True, slots=True)
class Capability:
    """What a runner can do; the facade adds identity and epoch.

    `executor` runs the whole forward pass. `attention_backend` is the one it attends by: its own
    name again where its attention is its own. `arithmetic` names how results round, see
    runner/arithmetic.py. `rendezvous_address` is the host:port at which this rank lets the ranks of
    its replica meet: the first of several ranks has one.
    """

    device: Device
    model: Model
    weight_version: WeightVersion
    limits: Limits
    features: frozenset[Feature]
    executor: str
    attention_backend: str
    random_seed: int
    ranks: RankCoordinates = RankCoordinates()
    adapter_slot_count: int = 0
    max_adapter_rank: int = 0
    arithmetic: str = ""
    rendezvous_address: str = ""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep KV alike. `window_token_count` None: every position."""

    layer_indices: tuple[int, ...]
    kv_head_count: int
    head_dim: int
    data_type: DataType
    window_token_count: int | None = None


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """KV pool geometry and bytes. `block_count` includes the null block. `prepared_bytes`: weights
    on the device that wait for their commit. `kept_tensors_bytes`: tensors on the host that did
    not come from files, as they came."""

    block_count: int
    block_token_count: int
    bytes_per_block: int
    layer_groups: tuple[LayerGroup, ...]
    used_block_count: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    free_bytes: int
    adapters_bytes: int = 0
    prepared_bytes: int = 0
    kept_tensors_bytes: int = 0

    @property
    def free_block_count(self) -> int:
        return self.block_count - 1 - self.used_block_count

    @property
    def token_count(self) -> int:
        """Tokens whose KV the pool holds."""
        return (self.block_count - 1) * self.block_token_count

    def sequences_of(self, token_count: int) -> int:
        """How many sequences of this length the pool holds. Each takes whole blocks."""
        return (self.block_count - 1) // -(-token_count // self.block_token_count)
