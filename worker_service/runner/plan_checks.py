"""Checks a plan against the worker's fixed bounds: refuses what no state would allow.

RequestState checks what depends on its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_service.domain.capability import Limits
from worker_service.domain.columns import NULL_BLOCK, IntColumn
from worker_service.domain.errors import PlanInvalid
from worker_service.domain.plan import AddedSequence, ScheduledRows, StepPlan

_RowsOf = Callable[[npt.NDArray[np.bool_]], IntColumn]
"""The rows of the entries of a flat column that a mask selects."""

_ROW_COLUMNS = (
    "start_positions",
    "token_counts",
    "source_step_distances",
    "literal_token_counts",
    "appended_block_counts",
)
_DRAFT_COLUMNS = ("draft_counts", "literal_draft_counts", "open_step_distances")
_FLAT_COLUMNS = {
    "literal_tokens": "literal_token_counts",
    "appended_blocks": "appended_block_counts",
    "literal_drafts": "literal_draft_counts",
}


@dataclass(frozen=True, slots=True)
class PlanBounds:
    """The bounds that every plan must keep. `block_count` includes the null block."""

    limits: Limits
    block_count: int
    block_size: int
    vocabulary_size: int
    adapter_slot_count: int = 0

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.limits.max_sequence_token_count // self.block_size)

    def check(self, plan: StepPlan) -> None:
        """Raises PlanInvalid, which names the field."""
        if plan.removed_rows.size:
            self._require_distinct_rows("plan.removed_rows", plan.removed_rows)
        for index, sequence in enumerate(plan.added):
            self._check_added(f"plan.added[{index}]", sequence)
        _check_columns(plan.scheduled)
        if plan.scheduled.rows.size:
            self._check_scheduled(plan)

    def _check_added(self, path: str, sequence: AddedSequence) -> None:
        limits, rows = self.limits, (sequence.row,)
        if not 0 <= sequence.row < limits.max_sequence_count:
            raise PlanInvalid(f"{path}.row", f"must be in [0, {limits.max_sequence_count})", rows)
        count = sequence.token_ids.size
        if not 1 <= count <= limits.max_sequence_token_count:
            raise PlanInvalid(
                f"{path}.token_ids",
                f"{count} tokens; 1 to {limits.max_sequence_token_count} are possible",
                rows,
            )
        self._require_tokens(f"{path}.token_ids", sequence.token_ids, _all_of(rows))
        if not 1 <= sequence.prompt_token_count <= count:
            raise PlanInvalid(f"{path}.prompt_token_count", f"must be in [1, {count}]", rows)
        self._require_blocks(f"{path}.block_ids", sequence.block_ids, _all_of(rows))
        if sequence.block_ids.size > self.max_blocks:
            raise PlanInvalid(f"{path}.block_ids", f"more than {self.max_blocks} blocks", rows)
        if not 0 <= sequence.computed_token_count < count:
            raise PlanInvalid(
                f"{path}.computed_token_count",
                f"must be below the {count} tokens: the last is always computed",
                rows,
            )
        if sequence.computed_token_count > sequence.block_ids.size * self.block_size:
            raise PlanInvalid(f"{path}.computed_token_count", "exceeds the blocks given", rows)
        slots = self.adapter_slot_count
        if not 0 <= sequence.adapter_slot <= slots:
            raise PlanInvalid(f"{path}.adapter_slot", f"this worker has {slots} slots", rows)
        if not sequence.adapter_slot and sequence.adapter_digest:
            raise PlanInvalid(f"{path}.adapter_digest", "must be empty without a slot", rows)

    def _check_scheduled(self, plan: StepPlan) -> None:
        scheduled, counts = plan.scheduled, plan.scheduled.token_counts
        path = "plan.scheduled"
        self._require_distinct_rows(f"{path}.rows", scheduled.rows)
        _refuse(
            scheduled, counts == 0, "token_counts", "a scheduled row computes at least one token"
        )
        total = int(counts.sum(dtype=np.int64))
        if total > self.limits.max_step_token_count:
            raise PlanInvalid(
                f"{path}.token_counts",
                f"{total} tokens; a step takes {self.limits.max_step_token_count}",
            )
        if scheduled.draft_counts.size:
            self._check_drafts(scheduled)
        given, distances = scheduled.literal_token_counts, scheduled.source_step_distances
        _refuse(
            scheduled,
            (given != 0) & (given != scheduled.sure_counts),
            "literal_token_counts",
            "must be 0 or the row's token count, without drafts",
        )
        self._require_tokens(
            f"{path}.literal_tokens",
            scheduled.literal_tokens,
            lambda wrong: np.repeat(scheduled.rows, given)[wrong],
        )
        self._require_blocks(
            f"{path}.appended_blocks",
            scheduled.appended_blocks,
            lambda wrong: np.repeat(scheduled.rows, scheduled.appended_block_counts)[wrong],
        )
        _refuse(
            scheduled,
            (given != 0) & (distances != 0),
            "source_step_distances",
            "a row with literal tokens takes none of a step",
        )
        _refuse(
            scheduled,
            distances >= plan.step_id,
            "source_step_distances",
            "reaches before the first step",
        )
        if scheduled.open_step_distances.size:
            furthest = min(self.limits.max_inflight_step_count, plan.step_id - 1)
            _refuse(
                scheduled,
                scheduled.open_step_distances > furthest,
                "open_step_distances",
                f"{furthest} steps can be in flight at most",
            )

    def _check_drafts(self, scheduled: ScheduledRows) -> None:
        drafts, given = scheduled.draft_counts, scheduled.literal_draft_counts
        _refuse(
            scheduled,
            drafts >= scheduled.token_counts,
            "draft_counts",
            "must be below the row's token count",
        )
        if given.size:
            _refuse(
                scheduled,
                (given != 0) & (given != drafts),
                "literal_draft_counts",
                "must be 0 or the row's draft count",
            )
        self._require_tokens(
            "plan.scheduled.literal_drafts",
            scheduled.literal_drafts,
            lambda wrong: np.repeat(scheduled.rows, given)[wrong],
        )

    def _require_distinct_rows(self, path: str, rows: IntColumn) -> None:
        count = self.limits.max_sequence_count
        if rows.min() < 0 or rows.max() >= count:
            wrong = rows[(rows < 0) | (rows >= count)]
            raise PlanInvalid(path, f"must be in [0, {count})", wrong)
        distinct, counts = np.unique(rows, return_counts=True)
        if distinct.size != rows.size:
            raise PlanInvalid(path, "must be distinct", distinct[counts > 1])

    def _require_tokens(self, path: str, tokens: IntColumn, rows_of: _RowsOf) -> None:
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.vocabulary_size):
            wrong = (tokens < 0) | (tokens >= self.vocabulary_size)
            raise PlanInvalid(
                path,
                f"must be below the vocabulary size, {self.vocabulary_size}",
                np.unique(rows_of(wrong)),
            )

    def _require_blocks(self, path: str, blocks: IntColumn, rows_of: _RowsOf) -> None:
        if blocks.size and (blocks.min() <= NULL_BLOCK or blocks.max() >= self.block_count):
            wrong = (blocks <= NULL_BLOCK) | (blocks >= self.block_count)
            raise PlanInvalid(
                path, f"must be in [1, {self.block_count})", np.unique(rows_of(wrong))
            )


def refuse_drafts(scheduled: ScheduledRows) -> None:
    """Refuses a plan with drafts, for a runner that verifies none. Raises PlanInvalid."""
    for name in _DRAFT_COLUMNS:
        if getattr(scheduled, name).any():
            rows = scheduled.rows[getattr(scheduled, name) != 0]
            raise PlanInvalid(f"plan.scheduled.{name}", "this worker verifies no drafts", rows)


def _all_of(rows: tuple[int, ...]) -> _RowsOf:
    """Whatever is wrong with them, these rows are to blame."""
    return lambda wrong: np.array(rows, dtype=np.int32)


def _refuse(scheduled: ScheduledRows, wrong: npt.NDArray[np.bool_], name: str, rule: str) -> None:
    """Refuses the scheduled rows where `wrong` [rows] is set, if there are any."""
    if wrong.any():
        raise PlanInvalid(f"plan.scheduled.{name}", rule, scheduled.rows[wrong])


def _check_columns(scheduled: ScheduledRows) -> None:
    """Checks sizes and signs. A column about drafts may be empty."""
    path, count = "plan.scheduled", scheduled.rows.size
    given = (name for name in _DRAFT_COLUMNS if getattr(scheduled, name).size)
    for name in (*_ROW_COLUMNS, *given):
        column = getattr(scheduled, name)
        if column.size != count:
            raise PlanInvalid(f"{path}.{name}", f"{column.size} entries for {count} rows")
        _refuse(scheduled, column < 0, name, "negative or too large")
    if not scheduled.draft_counts.size and scheduled.literal_draft_counts.size:
        given = scheduled.literal_draft_counts != 0
        _refuse(scheduled, given, "literal_draft_counts", "must be 0 or the row's draft count")
    for name, counts_name in _FLAT_COLUMNS.items():
        expected = int(getattr(scheduled, counts_name).sum(dtype=np.int64))
        if expected != getattr(scheduled, name).size:
            raise PlanInvalid(f"{path}.{name}", f"does not match {counts_name}")
