"""The control plane's own words for the step contract: what a step shall do and what came of it.

Twin of worker_service.domain.plan on purpose: the values of a step are each plane's own
(docs/adr/0014). Columns are plain lists of int, parallel by row;
protos/twinplane/worker/v1/step.proto says what they mean.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NewType

from control_plane.core.request import OutputKind as OutputKind
from control_plane.core.request import SamplingParams
from control_plane.core.tokens import Tokens

Row = NewType("Row", int)
BlockId = NewType("BlockId", int)

NULL_BLOCK = BlockId(0)


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """Generation (1 at a worker's start) and hex SHA-256 of the weights' content. `name` is what
    the operator calls them, if anything."""

    generation: int
    digest: str
    name: str = field(default="", compare=False)

    @property
    def label(self) -> str:
        """What metrics call it."""
        return self.name or self.digest[:12]


@dataclass(frozen=True, slots=True)
class AddedSequence:
    """A sequence that enters the persistent batch whole: the first `prompt_token_count` of its
    tokens are the prompt."""

    row: Row
    token_ids: array[int]
    prompt_token_count: int
    sampling: SamplingParams
    seed: int
    output: OutputKind
    block_ids: list[BlockId]
    computed_token_count: int
    adapter_slot: int = 0
    """Where the worker has its adapter; 0: it has none."""
    adapter_digest: str = ""


@dataclass(slots=True)
class ScheduledRows:
    """Parallel columns; `literal_tokens`, `appended_blocks` and `literal_drafts` are flat over all
    rows. The columns about drafts are empty where no row has any.

    The planner fills the columns. After that nobody changes them. The class is not frozen only
    because freezing so many fields costs more than scheduling a row.
    """

    rows: list[Row] = field(default_factory=list)
    start_positions: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    source_step_distances: list[int] = field(default_factory=list)
    literal_token_counts: list[int] = field(default_factory=list)
    literal_tokens: list[int] = field(default_factory=list)
    appended_block_counts: list[int] = field(default_factory=list)
    appended_blocks: list[BlockId] = field(default_factory=list)
    draft_counts: list[int] = field(default_factory=list)
    literal_draft_counts: list[int] = field(default_factory=list)
    literal_drafts: list[int] = field(default_factory=list)
    open_step_distances: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows removed, then sequences added, then scheduled rows executed."""

    epoch: int
    step_id: int
    weight_version: WeightVersion
    removed_rows: list[Row]
    added: list[AddedSequence]
    scheduled: ScheduledRows


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Which tokens some rows may take: one bitmask for each of `rows`, one after another, each
    ceil(vocabulary / 32) little-endian 32-bit words."""

    rows: list[Row]
    bitmasks: bytes


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The sampling of rows that a step has held; rows without a mask are free."""

    epoch: int
    step_id: int
    rows: list[Row]
    masks: GrammarMasks | None = None


Message = StepPlan | SamplePlan
"""What goes to the worker, in order; each is answered by one StepResult."""


@dataclass(frozen=True, slots=True)
class RowFault:
    """A row that failed while the others of its step went on. `kind` is the contract's name."""

    row: Row
    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class StepResult:
    """Tokens per row in the plan's order; `tokens` is flat, `token_counts` of it per row.

    An empty `token_counts` means one each. `held_rows` wait for a SamplePlan. `digest`: of what a
    rank has applied; empty from a worker that executes plans alone.
    """

    epoch: int
    step_id: int
    rows: list[Row]
    token_counts: list[int]
    tokens: Tokens
    held_rows: list[Row] = field(default_factory=list)
    faults: list[RowFault] = field(default_factory=list)
    queued_seconds: float = 0.0
    executed_seconds: float = 0.0
    digest: bytes = b""
    is_leaving: bool = False
    """The worker will end soon: whoever can go on elsewhere should."""
