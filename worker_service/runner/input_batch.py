"""One step's inputs, gathered from the persistent batch without a loop over rows or tokens."""

from __future__ import annotations

import numpy as np

from worker_service.domain.batch import StepBatch
from worker_service.domain.columns import IntColumn
from worker_service.domain.plan import StepPlan
from worker_service.runner.logit_batch import LogitBatch
from worker_service.runner.request_state import RequestState


def prepare(plan: StepPlan, state: RequestState) -> tuple[StepBatch, LogitBatch]:
    """The inputs and positions of interest of an applied plan, which schedules at least one row."""
    scheduled = plan.scheduled
    rows, counts = scheduled.rows, scheduled.token_counts
    # The plan's start positions, plus the drafts accepted since it was made.
    starts = state.computed_counts[rows]
    query_starts = np.zeros(rows.size + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    token_rows = np.repeat(rows, counts)
    offsets = np.arange(query_starts[-1], dtype=np.int32) - np.repeat(query_starts[:-1], counts)
    positions = np.repeat(starts, counts) + offsets
    block_size = state.block_size
    blocks = state.block_tables[token_rows, positions // block_size]
    context_lengths = starts + counts
    used_blocks = -(-int(context_lengths.max()) // block_size)
    slots = state.adapter_slots[rows]
    batch = StepBatch(
        query_starts=query_starts,
        context_lengths=context_lengths,
        block_tables=state.block_tables[rows, :used_blocks],
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        token_ids=state.token_ids[token_rows, positions],
        adapter_slots=slots if slots.any() else None,
    )
    return batch, _positions_of_interest(plan, state, batch)


def _positions_of_interest(plan: StepPlan, state: RequestState, batch: StepBatch) -> LogitBatch:
    """For each row that reaches the end of its tokens and wants more than KV: its last token, and
    every draft behind it."""
    scheduled = plan.scheduled
    rows, ends = scheduled.rows, batch.context_lengths
    kinds = state.end_kinds[rows]
    drafts = scheduled.draft_counts
    token_ends = ends - drafts if drafts.size else ends
    wanted = np.flatnonzero((token_ends == state.known_counts[rows]) & (kinds != 0))
    before: IntColumn | int = 0  # how far each position is before its row's last
    if drafts.size:
        counts = drafts[wanted] + 1
        wanted = np.repeat(wanted, counts)
        before = np.repeat(np.cumsum(counts), counts) - np.arange(1, wanted.size + 1)
        before = before.astype(np.int32)
    return LogitBatch(
        token_indices=batch.query_starts[1:][wanted] - 1 - before,
        rows=rows[wanted],
        positions=ends[wanted] - before,
        kinds=kinds[wanted],
    )
