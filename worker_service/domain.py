"""The worker's own words for the step contract: values only, no protobuf, no torch.

Columns are numpy arrays so that input preparation stays vectorised. The error tree:

    WorkerError
    ├── PlanInvalid           the plan could follow from no state: names the field
    └── Precondition          the plan does not follow from this state
        ├── StaleEpoch        ContractMismatch      WeightVersionMismatch
        ├── StepGap           StepResultGone        StepConflict
        ├── StepHeld          StepNotHeld
        └── PlanMismatch      the planes have drifted apart: resync
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int32]

CONTRACT_VERSION = 1
NULL_BLOCK = 0


class WorkerError(Exception):
    """A request the worker refuses; nothing was executed. `reason` goes into ErrorInfo."""

    reason = "INTERNAL"


class PlanInvalid(WorkerError):
    """The plan is malformed, whatever the worker's state."""

    reason = "INVALID_PLAN"

    def __init__(self, field_path: str, description: str) -> None:
        super().__init__(f"{field_path}: {description}")
        self.field_path = field_path
        self.description = description


class Precondition(WorkerError):
    """The request does not follow from the worker's state."""


class StaleEpoch(Precondition):
    """Another controller holds a newer claim."""

    reason = "STALE_EPOCH"


class ContractMismatch(Precondition):
    """No contract version is shared."""

    reason = "CONTRACT_VERSION_MISMATCH"


class WeightVersionMismatch(Precondition):
    """The plan was made for other weights."""

    reason = "WEIGHT_VERSION_MISMATCH"


class StepGap(Precondition):
    """A step id is missing before this one."""

    reason = "STEP_GAP"


class StepResultGone(Precondition):
    """The step was executed and its result is no longer kept."""

    reason = "STEP_RESULT_GONE"


class StepConflict(Precondition):
    """Another plan was executed under this step id."""

    reason = "STEP_CONFLICT"


class StepHeld(Precondition):
    """A held step must be sampled before the next plan."""

    reason = "STEP_HELD"


class StepNotHeld(Precondition):
    """Sample names a step that is not held."""

    reason = "STEP_NOT_HELD"


class PlanMismatch(Precondition):
    """Rows, positions or tokens differ from what the worker holds."""

    reason = "PLAN_MISMATCH"


class SamplingMode(Enum):
    """What happens to the logits of rows that reach the end of their tokens."""

    INLINE = 1
    HOLD = 2
    NONE = 3


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Generation (1 at start) and hex SHA-256 of the content."""

    generation: int
    digest: str


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Resolved: every field has a value. Temperature 0 is greedy, top_k 0 keeps all."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int


@dataclass(frozen=True, slots=True, eq=False)
class AddedSequence:
    """A sequence that enters the batch whole. `token_ids` int32 [n]; `block_ids` int32 [m]."""

    row: int
    token_ids: IntColumn
    sampling: SamplingParameters
    block_ids: IntColumn
    computed_token_count: int


def _empty() -> IntColumn:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledRows:
    """Parallel int32 columns of length [rows]; `literal_tokens` and `appended_blocks` are flat."""

    rows: IntColumn = field(default_factory=_empty)
    start_positions: IntColumn = field(default_factory=_empty)
    token_counts: IntColumn = field(default_factory=_empty)
    source_step_distances: IntColumn = field(default_factory=_empty)
    literal_token_counts: IntColumn = field(default_factory=_empty)
    literal_tokens: IntColumn = field(default_factory=_empty)
    appended_block_counts: IntColumn = field(default_factory=_empty)
    appended_blocks: IntColumn = field(default_factory=_empty)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step. `fingerprint` digests the whole plan: equal plans have equal fingerprints."""

    epoch: int
    step_id: int
    weight_version: WeightVersion
    removed_rows: IntColumn
    added: tuple[AddedSequence, ...]
    scheduled: ScheduledRows
    sampling: SamplingMode
    fingerprint: bytes


class RowFaultKind(Enum):
    """Why one row failed."""

    INVALID_LOGITS = 1
    EMPTY_MASK = 2


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row without a token in this step."""

    row: int
    kind: RowFaultKind
    detail: str


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """`rows`, `token_counts` int32 [sampled rows]; `tokens` int32 [sum of counts]; seconds."""

    epoch: int
    step_id: int
    rows: IntColumn = field(default_factory=_empty)
    token_counts: IntColumn = field(default_factory=_empty)
    tokens: IntColumn = field(default_factory=_empty)
    faults: tuple[RowFault, ...] = ()
    queued_seconds: float = 0.0
    executed_seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMasks:
    """`rows` int32 [m]; `bitmasks` uint32 [m, ceil(vocabulary / 32)], bit t % 32 allows token t."""

    rows: IntColumn
    bitmasks: npt.NDArray[np.uint32]


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
    """(rank, size) of each kind of parallelism."""

    tensor: tuple[int, int] = (0, 1)
    pipeline: tuple[int, int] = (0, 1)
    data: tuple[int, int] = (0, 1)


@dataclass(frozen=True, slots=True)
class Model:
    """What was loaded."""

    name: str
    architecture: str
    vocabulary_size: int
    data_type: DataType


@dataclass(frozen=True, slots=True)
class Capability:
    """What a runner can do; the facade adds identity and epoch."""

    device: Device
    model: Model
    weight_version: WeightVersion
    limits: Limits
    features: frozenset[Feature]
    attention_backend: str
    random_seed: int
    ranks: RankCoordinates = RankCoordinates()
    adapter_slot_count: int = 0


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
    """KV pool geometry and bytes. `block_count` includes the null block."""

    block_count: int
    block_token_count: int
    bytes_per_block: int
    layer_groups: tuple[LayerGroup, ...]
    used_block_count: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    free_bytes: int

    @property
    def free_block_count(self) -> int:
        return self.block_count - 1 - self.used_block_count


class Runner(Protocol):
    """What the facade owns: executes plans one at a time, on the thread that owns the device.

    The real one is runner.model_runner.ModelRunner; runner.simulated.SimulatedRunner has no model.
    """

    def capability(self) -> Capability:
        """Static facts. Safe from any thread once the runner is built."""
        ...

    def memory_pool(self) -> MemoryPool:
        """Geometry and current bytes."""
        ...

    def reset(self) -> None:
        """Clears the persistent batch and any held step: a new epoch begins."""
        ...

    def forward(self, plan: StepPlan) -> StepResult:
        """Applies and executes a plan. Raises PlanInvalid or PlanMismatch with nothing changed."""
        ...

    def sample(self, step_id: int, masks: GrammarMasks | None) -> StepResult:
        """Samples the step that forward held. Raises PlanInvalid for masks that do not fit it."""
        ...
