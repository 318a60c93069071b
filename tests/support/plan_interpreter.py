"""What plans do to a worker's rows, in plain Python: the reference that fake workers stand on.

It knows rows, tokens, positions and blocks; what lies in the blocks and what is sampled is the
caller's. Whatever the step contract forbids of a plan's rows raises PlanRefused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from control_plane.core.plan import AddedSequence, Row, StepPlan
from control_plane.core.request import OutputKind


class PlanRefused(Exception):
    """The plan does not follow from the rows."""


@dataclass(slots=True, eq=False)
class WorkerRow:
    """A sequence in its row. `accepted` counts drafts by the step that accepted them."""

    tokens: list[int]
    computed: int
    blocks: list[int]
    seed: int
    output: OutputKind
    sampled_step: int = 0
    sampled_token: int = -1
    held_step: int = 0
    adapter_slot: int = 0
    accepted: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Delta:
    """One scheduled row of a plan, by its columns."""

    number: Row
    start: int
    count: int
    distance: int
    literals: list[int]
    blocks: list[int]
    draft_count: int
    literal_drafts: list[int]
    open_distance: int

    @property
    def sure_count(self) -> int:
        """Its tokens without the drafts."""
        return self.count - self.draft_count


@dataclass(frozen=True, slots=True)
class Run:
    """A row that runs from position `start` to before `end`. Its tokens end with its drafts."""

    delta: Delta
    row: WorkerRow
    start: int

    @property
    def end(self) -> int:
        return self.start + self.delta.count

    @property
    def reaches_end(self) -> bool:
        """Whether its last position gives logits, unless only the KV is wanted."""
        return self.end == len(self.row.tokens) and self.row.output is not OutputKind.NONE


def deltas(plan: StepPlan) -> Iterator[Delta]:
    """The scheduled rows of a plan. Raises PlanRefused unless its columns fit together."""
    columns = plan.scheduled
    none = [0] * len(columns.rows)
    literals, blocks = iter(columns.literal_tokens), iter(columns.appended_blocks)
    drafts = iter(columns.literal_drafts)
    for (
        number,
        start,
        count,
        distance,
        literals_of,
        blocks_of,
        draft_count,
        drafts_of,
        opened,
    ) in zip(
        columns.rows,
        columns.start_positions,
        columns.token_counts,
        columns.source_step_distances,
        columns.literal_token_counts,
        columns.appended_block_counts,
        columns.draft_counts or none,
        columns.literal_draft_counts or none,
        columns.open_step_distances or none,
        strict=True,
    ):
        yield Delta(
            number,
            start,
            count,
            distance,
            [next(literals) for _ in range(literals_of)],
            [next(blocks) for _ in range(blocks_of)],
            draft_count,
            [next(drafts) for _ in range(drafts_of)],
            opened,
        )
    _require(not [*literals, *blocks, *drafts], "flat columns are longer than their counts")


def _no_drafter(row: WorkerRow, count: int) -> list[int]:
    raise PlanRefused("there is no drafter")


class PlanInterpreter:
    """The rows. `propose` gives a number of drafts that stand behind a row's tokens."""

    def __init__(
        self, block_size: int, propose: Callable[[WorkerRow, int], list[int]] = _no_drafter
    ) -> None:
        self.rows: dict[Row, WorkerRow] = {}
        self._block_size = block_size
        self._propose = propose

    def apply(
        self,
        plan: StepPlan,
        inspect: Callable[[Delta, WorkerRow, int], None] = lambda delta, row, start: None,
    ) -> list[Run]:
        """Removes, adds, and gives scheduled rows their tokens, drafts and blocks; returns what is
        to run. `inspect` sees each scheduled row before it changes, and where it really starts."""
        for number in plan.removed_rows:
            _require(number in self.rows, f"removed row {number} is free")
            del self.rows[number]
        for sequence in plan.added:
            self._add(sequence)
        numbers = plan.scheduled.rows
        _require(len(set(numbers)) == len(numbers), "rows are not distinct")
        return [self._take(plan.step_id, delta, inspect) for delta in deltas(plan)]

    def computed(self, run: Run) -> None:
        """The run's tokens have their KV now."""
        run.row.computed = run.start + run.delta.sure_count

    def hold(self, step_id: int, run: Run) -> None:
        """The row waits for its mask."""
        run.row.held_step = step_id

    def sample_held(self, step_id: int, number: Row, token: int) -> None:
        """The step's held row gets its token."""
        row = self.rows[number]
        _require(row.held_step == step_id, f"step {step_id} does not hold row {number}")
        row.held_step = 0
        row.sampled_step, row.sampled_token = step_id, token

    def sample(self, step_id: int, run: Run, token_after: Callable[[WorkerRow], int]) -> list[int]:
        """Samples behind the last token that is sure, and behind each draft that is accepted.

        Leaves the row at the end of what was accepted; returns its new tokens.
        """
        row, drafts = run.row, run.row.tokens[run.start + run.delta.sure_count :]
        del row.tokens[run.start + run.delta.sure_count :]
        tokens = [token_after(row)]
        for draft in drafts:
            if draft != tokens[-1]:
                break
            row.tokens.append(draft)
            tokens.append(token_after(row))
        row.computed = len(row.tokens)
        row.accepted[step_id] = len(tokens) - 1
        row.sampled_step, row.sampled_token = step_id, tokens[-1]
        return tokens

    def _add(self, sequence: AddedSequence) -> None:
        _require(sequence.row not in self.rows, f"added row {sequence.row} is taken")
        count = len(sequence.token_ids)
        _require(0 < sequence.prompt_token_count <= count, "prompt token count")
        _require(0 <= sequence.computed_token_count < count, "computed token count")
        self.rows[sequence.row] = WorkerRow(
            list(sequence.token_ids),
            sequence.computed_token_count,
            list(sequence.block_ids),
            sequence.seed,
            sequence.output,
            adapter_slot=sequence.adapter_slot,
        )

    def _take(
        self, step_id: int, delta: Delta, inspect: Callable[[Delta, WorkerRow, int], None]
    ) -> Run:
        number = delta.number
        _require(number in self.rows, f"scheduled row {number} is free")
        row, start = self.rows[number], delta.start
        if delta.open_distance:
            first = step_id - delta.open_distance
            _require(first > 0, "open from before the first step")
            start += sum(count for step, count in row.accepted.items() if step >= first)
        _require(start == row.computed, f"row {number} starts at {start}, is at {row.computed}")
        _require(0 <= delta.draft_count < delta.count, "drafts stand behind a token at least")
        inspect(delta, row, start)
        row.held_step = 0
        row.blocks += delta.blocks
        sure_end = start + delta.sure_count
        if delta.distance:
            _require(not delta.literals, "literal tokens, and one of a step")
            _require(
                row.sampled_step == step_id - delta.distance > 0,
                f"row {number} has its last token of step {row.sampled_step}",
            )
            row.tokens.append(row.sampled_token)
        if delta.literals:
            _require(len(delta.literals) == delta.sure_count, "literal tokens for a part only")
            row.tokens[start:] = delta.literals
        _require(sure_end <= len(row.tokens), f"row {number} has {len(row.tokens)} tokens only")
        if delta.distance or delta.draft_count:
            _require(sure_end == len(row.tokens), "a new token that is not the last")
        if delta.draft_count:
            _require(row.output is OutputKind.SAMPLE, "drafts of a row that does not sample")
            drafts = delta.literal_drafts or self._propose(row, delta.draft_count)
            _require(len(drafts) == delta.draft_count, "literal drafts for a part only")
            row.tokens += drafts
        end = start + delta.count
        _require(end <= len(row.blocks) * self._block_size, f"row {number} lacks blocks")
        return Run(delta, row, start)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanRefused(message)
