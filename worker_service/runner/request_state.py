"""The persistent batch: fixed rows, kept on the host as numpy columns, changed only by plans.

A plan is checked whole against this state before anything changes, so a refused plan leaves no
trace. The layout follows vLLM's Model Runner V2 (`vllm/v1/worker/gpu/states.py`): a sequence keeps
its row for life, and the per-step batch only gathers rows.
"""

from __future__ import annotations

import numpy as np

from worker_service.domain.adapters import AdapterLimits
from worker_service.domain.capability import Limits
from worker_service.domain.columns import NULL_BLOCK, IntColumn
from worker_service.domain.errors import PlanInvalid, PlanMismatch, RowNotHeld
from worker_service.domain.plan import AddedSequence, OutputKind, ScheduledRows, StepPlan
from worker_service.runner.adapters import AdapterSlots
from worker_service.runner.drafts import AcceptedDrafts
from worker_service.runner.logit_batch import BoolColumn, LogitKind
from worker_service.runner.plan_checks import PlanBounds

_END_KINDS = {
    OutputKind.SAMPLE: int(LogitKind.SAMPLE),
    OutputKind.HOLD: int(LogitKind.HOLD),
    OutputKind.NONE: 0,
}


class RequestState:
    """Rows of the persistent batch.

    Columns, one entry per row: `active` bool; `known_counts` int32, tokens held in `token_ids`;
    `computed_counts` int32, tokens whose KV is written; `sampled_tokens` int32 with
    `sampled_steps` int64, the last sampled token and its step (0: none); `prompt_counts` int32,
    leading tokens that are the prompt; `end_kinds` int8, the LogitKind of the logits at the
    end of the tokens (0: only the KV is wanted); `held_steps` int64, the step whose logits wait for
    Sample (0: none); `block_counts` int32; `adapter_slots` int32 (0: none).
    `token_ids` int32 [rows, max_sequence_token_count]; `block_tables` int32 [rows, max_blocks],
    padded with the null block. SamplingState knows how a row is sampled.
    """

    def __init__(
        self,
        limits: Limits,
        block_count: int,
        block_size: int,
        vocabulary_size: int,
        adapters: AdapterSlots | None = None,
    ) -> None:
        rows = limits.max_sequence_count
        length = limits.max_sequence_token_count
        self._adapters = AdapterSlots(AdapterLimits()) if adapters is None else adapters
        self.bounds = PlanBounds(
            limits, block_count, block_size, vocabulary_size, self._adapters.limits.slot_count
        )
        self.block_size = block_size
        self.token_ids = np.zeros((rows, length), dtype=np.int32)
        self.block_tables = np.full((rows, self.bounds.max_blocks), NULL_BLOCK, dtype=np.int32)
        self.active = np.zeros(rows, dtype=bool)
        self.known_counts = np.zeros(rows, dtype=np.int32)
        self.computed_counts = np.zeros(rows, dtype=np.int32)
        self.block_counts = np.zeros(rows, dtype=np.int32)
        self.sampled_tokens = np.zeros(rows, dtype=np.int32)
        self.sampled_steps = np.zeros(rows, dtype=np.int64)
        self.prompt_counts = np.zeros(rows, dtype=np.int32)
        self.end_kinds = np.zeros(rows, dtype=np.int8)
        self.held_steps = np.zeros(rows, dtype=np.int64)
        self.adapter_slots = np.zeros(rows, dtype=np.int32)
        self._adapters.uses = lambda slot: int(np.count_nonzero(self.adapter_slots == slot))
        self._accepted = AcceptedDrafts(rows, limits.max_inflight_step_count)

    def reset(self) -> None:
        """Removes every row."""
        self._remove(np.flatnonzero(self.active).astype(np.int32))

    def used_block_count(self) -> int:
        """Distinct blocks in the block tables of active rows."""
        tables = self.block_tables[self.active]
        return int(np.unique(tables[tables != NULL_BLOCK]).size)

    def apply(self, plan: StepPlan) -> None:
        """Checks the whole plan, then removes, adds, and records what is scheduled.

        Afterwards `computed_counts` still hold the real start of the scheduled tokens, which a plan
        may not know: `advance` moves them on once the step has run. Tokens that come from an
        earlier step are in `token_ids` already, and behind them the drafts that the plan gives.
        Raises PlanInvalid or PlanMismatch with nothing changed.
        """
        self._check(plan)
        self._remove(plan.removed_rows)
        for sequence in plan.added:
            self._add(sequence)
        scheduled = plan.scheduled
        if scheduled.rows.size:
            # A plan that schedules a held row has a token for it: its logits are no longer needed.
            self.held_steps[scheduled.rows] = 0
            self._append_blocks(scheduled)
            self._append_tokens(scheduled)
            if scheduled.literal_drafts.size:
                given = scheduled.literal_draft_counts
                self.put_drafts(scheduled.rows, given, scheduled.literal_drafts)

    def advance(self, scheduled: ScheduledRows) -> None:
        """Counts the scheduled tokens as computed, but not drafts before they are accepted."""
        self.computed_counts[scheduled.rows] += scheduled.sure_counts

    def put_drafts(self, rows: IntColumn, counts: IntColumn, drafts: IntColumn) -> None:
        """Writes drafts behind the rows' tokens, `counts` of each, flat in `drafts`; all int32.
        They do not count as tokens yet."""
        repeated = np.repeat(rows, counts)
        self.token_ids[repeated, self.known_counts[repeated] + _ranges(counts)] = drafts

    def accept_drafts(self, rows: IntColumn, counts: IntColumn, step_id: int) -> None:
        """Makes the first `counts` drafts of each row its tokens; their KV is written. The other
        drafts leave the row. Called once for each row that verified drafts, after `advance`.
        """
        self.known_counts[rows] += counts
        self.computed_counts[rows] += counts
        self._accepted.record(rows, step_id, counts)

    def record_held(self, rows: IntColumn, step_id: int) -> None:
        """Notes that the rows wait for Sample, until they are sampled, scheduled or removed."""
        self.held_steps[rows] = step_id

    def require_held(self, rows: IntColumn, step_id: int) -> None:
        """Raises RowNotHeld unless the step holds every one of the rows."""
        known = (rows >= 0) & (rows < self.active.size)
        wrong = ~known
        wrong[known] = self.held_steps[rows[known]] != step_id
        if wrong.any():
            raise RowNotHeld(f"step {step_id} does not hold row {_first(rows[wrong])}", rows[wrong])

    def record_sampled(self, rows: IntColumn, tokens: IntColumn, step_id: int) -> None:
        """Keeps the tokens sampled by a step, for plans that name them as their source."""
        self.sampled_tokens[rows] = tokens
        self.sampled_steps[rows] = step_id
        self.held_steps[rows] = 0

    def record_faults(self, rows: IntColumn, step_id: int) -> None:
        """Keeps a placeholder for rows that failed in a step.

        A plan that was sent before the fault was known may name the step as their source. To refuse
        it would punish the other rows. The failed rows' tokens are undefined and must be ignored.
        """
        self.record_sampled(rows, np.zeros_like(rows), step_id)

    # --- checks -------------------------------------------------------------------------------

    def _check(self, plan: StepPlan) -> None:
        self.bounds.check(plan)
        active = self._check_taken(plan)
        rows = plan.scheduled.rows
        if rows.size:
            if not active[rows].all():
                free = rows[~active[rows]]
                raise PlanMismatch(f"scheduled row {_first(free)} holds no sequence", free)
            self._check_positions(plan)

    def _check_taken(self, plan: StepPlan) -> BoolColumn:
        """Which rows hold a sequence once the plan has removed and added its own."""
        active, removed = self.active.copy(), plan.removed_rows
        if not active[removed].all():
            free = removed[~active[removed]]
            raise PlanMismatch(f"removed row {_first(free)} holds no sequence", free)
        active[removed] = False
        for sequence in plan.added:
            if active[sequence.row]:
                raise PlanMismatch(f"added row {sequence.row} is taken", (sequence.row,))
            active[sequence.row] = True
            self._adapters.check(sequence)
        return active

    def _check_positions(self, plan: StepPlan) -> None:
        scheduled = plan.scheduled
        rows, starts, counts = scheduled.rows, scheduled.start_positions, scheduled.token_counts
        known, computed = self.known_counts.copy(), self.computed_counts.copy()
        blocks, sampled = self.block_counts.copy(), self.sampled_steps.copy()
        for sequence in plan.added:
            known[sequence.row] = sequence.token_ids.size
            computed[sequence.row] = sequence.computed_token_count
            blocks[sequence.row] = sequence.block_ids.size
            sampled[sequence.row] = 0
        if scheduled.open_step_distances.size:
            starts = starts + self._accepted_since(plan)
        ends = starts.astype(np.int64) + counts
        wrong = ends > self.bounds.limits.max_sequence_token_count
        if wrong.any():
            raise PlanInvalid(
                "plan.scheduled.token_counts",
                "passes the longest sequence, "
                f"{self.bounds.limits.max_sequence_token_count} tokens",
                rows[wrong],
            )
        wrong = starts != computed[rows]
        if wrong.any():
            row = _first(rows[wrong])
            raise PlanMismatch(
                f"row {row} starts at {_first(starts[wrong])}, "
                f"its computed count is {computed[row]}",
                rows[wrong],
            )
        # Step ids outgrow int32 in a long life.
        distances = scheduled.source_step_distances.astype(np.int64)
        from_step = distances > 0
        wrong = from_step & (sampled[rows] != plan.step_id - distances)
        if wrong.any():
            row = _first(rows[wrong])
            raise PlanMismatch(
                f"row {row} has no token of step {plan.step_id - _first(distances[wrong])}; "
                f"its last is of step {sampled[row]}",
                rows[wrong],
            )
        held = known[rows] + from_step
        token_ends, to_end = ends, from_step
        if scheduled.draft_counts.size:
            self._check_verifying(plan)
            drafts = scheduled.draft_counts
            token_ends, to_end = ends - drafts, from_step | (drafts > 0)
        given = scheduled.literal_token_counts != 0
        wrong = ~given & ((token_ends > held) | (to_end & (token_ends != held)))
        if wrong.any():
            row = _first(rows[wrong])
            raise PlanMismatch(
                f"row {row} is scheduled to position {_first(token_ends[wrong])}, "
                f"its tokens reach to {_first(held[wrong])}",
                rows[wrong],
            )
        held_blocks = blocks[rows] + scheduled.appended_block_counts
        wrong = held_blocks > self.bounds.max_blocks
        if wrong.any():
            raise PlanInvalid(
                "plan.scheduled.appended_blocks",
                f"a row has {self.bounds.max_blocks} at most",
                rows[wrong],
            )
        wrong = held_blocks.astype(np.int64) * self.block_size < ends
        if wrong.any():
            row = _first(rows[wrong])
            raise PlanMismatch(
                f"row {row} needs blocks for {_first(ends[wrong])} tokens, "
                f"has {_first(held_blocks[wrong])} blocks",
                rows[wrong],
            )

    def _accepted_since(self, plan: StepPlan) -> IntColumn:
        """How much further than planned each scheduled row starts, int32 [rows]."""
        scheduled = plan.scheduled
        rows = scheduled.rows
        accepted = self._accepted.since(rows, plan.step_id, scheduled.open_step_distances)
        fresh = np.array([sequence.row for sequence in plan.added], dtype=np.int32)
        return np.where(np.isin(rows, fresh), np.int32(0), accepted)

    def _check_verifying(self, plan: StepPlan) -> None:
        """Refuses drafts of rows that do not sample within the step."""
        kinds = self.end_kinds.copy()
        for sequence in plan.added:
            kinds[sequence.row] = _END_KINDS[sequence.output]
        verifying = plan.scheduled.rows[plan.scheduled.draft_counts > 0]
        wrong = kinds[verifying] != LogitKind.SAMPLE
        if wrong.any():
            raise PlanInvalid(
                "plan.scheduled.draft_counts",
                "a row verifies drafts only if its output is sampled",
                verifying[wrong],
            )

    # --- changes ------------------------------------------------------------------------------

    def _remove(self, rows: IntColumn) -> None:
        self.active[rows] = False
        self.known_counts[rows] = 0
        self.computed_counts[rows] = 0
        self.block_counts[rows] = 0
        self.sampled_steps[rows] = 0
        self.held_steps[rows] = 0
        self.adapter_slots[rows] = 0
        self.block_tables[rows] = NULL_BLOCK
        self._accepted.forget(rows)

    def _add(self, sequence: AddedSequence) -> None:
        row = sequence.row
        self.active[row] = True
        self.token_ids[row, : sequence.token_ids.size] = sequence.token_ids
        self.known_counts[row] = sequence.token_ids.size
        self.computed_counts[row] = sequence.computed_token_count
        self.block_tables[row, : sequence.block_ids.size] = sequence.block_ids
        self.block_counts[row] = sequence.block_ids.size
        self.sampled_steps[row] = 0
        self.prompt_counts[row] = sequence.prompt_token_count
        self.end_kinds[row] = _END_KINDS[sequence.output]
        self.adapter_slots[row] = sequence.adapter_slot

    def _append_blocks(self, scheduled: ScheduledRows) -> None:
        counts = scheduled.appended_block_counts
        if not scheduled.appended_blocks.size:
            return
        rows = np.repeat(scheduled.rows, counts)
        self.block_tables[rows, self.block_counts[rows] + _ranges(counts)] = (
            scheduled.appended_blocks
        )
        self.block_counts[scheduled.rows] += counts

    def _append_tokens(self, scheduled: ScheduledRows) -> None:
        rows = scheduled.rows
        from_step = scheduled.source_step_distances > 0
        if from_step.any():
            sources = rows[from_step]
            self.token_ids[sources, self.known_counts[sources]] = self.sampled_tokens[sources]
            self.known_counts[sources] += 1
        counts = scheduled.literal_token_counts
        if scheduled.literal_tokens.size:
            repeated = np.repeat(rows, counts)
            starts = self.computed_counts[repeated]
            self.token_ids[repeated, starts + _ranges(counts)] = scheduled.literal_tokens
            literal = rows[counts > 0]
            self.known_counts[literal] = self.computed_counts[literal] + counts[counts > 0]


def _ranges(counts: IntColumn) -> IntColumn:
    """[0, 1, … counts[0] - 1, 0, 1, … counts[1] - 1, …] without a loop."""
    ends = np.cumsum(counts)
    return (np.arange(ends[-1]) - np.repeat(ends - counts, counts)).astype(np.int32)


def _first(column: IntColumn) -> int:
    return int(column[0])
