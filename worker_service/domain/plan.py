"""A step: what it shall do and what came of it. Values only.

Twin of control_plane.core.plan on purpose: the values of a step are each plane's own
(docs/adr/0014). Columns are parallel by row; protos/twinplane/worker/v1/step.proto says what they
mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from worker_service.domain.columns import IntColumn
from worker_service.domain.sampling import SamplingParameters

CONTRACT_VERSION = 1


class OutputKind(Enum):
    """What becomes of the logits at the end of a sequence's tokens."""

    SAMPLE = 1
    HOLD = 2
    NONE = 3


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Generation (1 at start) and hex SHA-256 of the content."""

    generation: int
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class AddedSequence:
    """A sequence that enters the batch whole. `token_ids` int32 [n], of which the first
    `prompt_token_count` are the prompt; `block_ids` int32 [m]. `adapter_slot` 0: the model alone,
    and `adapter_digest` is empty."""

    row: int
    token_ids: IntColumn
    prompt_token_count: int
    sampling: SamplingParameters
    output: OutputKind
    block_ids: IntColumn
    computed_token_count: int
    adapter_slot: int = 0
    adapter_digest: str = ""


def _empty() -> IntColumn:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledRows:
    """Parallel int32 columns of length [rows]; `literal_tokens`, `appended_blocks` and
    `literal_drafts` are flat. A column about drafts may be empty: all 0."""

    rows: IntColumn = field(default_factory=_empty)
    start_positions: IntColumn = field(default_factory=_empty)
    token_counts: IntColumn = field(default_factory=_empty)
    source_step_distances: IntColumn = field(default_factory=_empty)
    literal_token_counts: IntColumn = field(default_factory=_empty)
    literal_tokens: IntColumn = field(default_factory=_empty)
    appended_block_counts: IntColumn = field(default_factory=_empty)
    appended_blocks: IntColumn = field(default_factory=_empty)
    draft_counts: IntColumn = field(default_factory=_empty)
    literal_draft_counts: IntColumn = field(default_factory=_empty)
    literal_drafts: IntColumn = field(default_factory=_empty)
    open_step_distances: IntColumn = field(default_factory=_empty)

    @property
    def sure_counts(self) -> IntColumn:
        """How many scheduled tokens each row has without its drafts, int32 [rows]."""
        counts = self.token_counts
        return counts - self.draft_counts if self.draft_counts.size else counts


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step. `fingerprint` digests the whole plan: equal plans have equal fingerprints. It is
    a function because only a repeated step id asks for it."""

    epoch: int
    step_id: int
    weight_version: WeightVersion
    removed_rows: IntColumn
    added: tuple[AddedSequence, ...]
    scheduled: ScheduledRows
    fingerprint: Callable[[], bytes]


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
    """What came of a step, or of the sampling of held rows.

    `rows`, `token_counts` int32 [sampled rows]; `tokens` int32 [sum of counts]; `held_rows` int32,
    those whose logits now wait; seconds. Of the ranks of a replica only one answers with rows and
    tokens; each has the `digest` of what it applied (parallel/digest.py), empty where there is but
    one rank.
    """

    epoch: int
    step_id: int
    rows: IntColumn = field(default_factory=_empty)
    token_counts: IntColumn = field(default_factory=_empty)
    tokens: IntColumn = field(default_factory=_empty)
    held_rows: IntColumn = field(default_factory=_empty)
    faults: tuple[RowFault, ...] = ()
    queued_seconds: float = 0.0
    executed_seconds: float = 0.0
    digest: bytes = b""


@dataclass(frozen=True, slots=True, eq=False)
class GrammarMasks:
    """`rows` int32 [m]; `bitmasks` uint32 [m, ceil(vocabulary / 32)], bit t % 32 allows token t."""

    rows: IntColumn
    bitmasks: npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True, eq=False)
class SamplePlan:
    """The sampling of rows that a step has held. `rows` int32 [n]; `masks` for some of them."""

    epoch: int
    step_id: int
    rows: IntColumn
    masks: GrammarMasks | None
