"""One step's inputs, gathered from the persistent batch without a loop over rows or tokens."""

from __future__ import annotations

import numpy as np

from worker_service.domain.batch import StepBatch
from worker_service.domain.plan import StepPlan
from worker_service.runner.logit_batch import LogitBatch
from worker_service.runner.request_state import RequestState


def prepare(plan: StepPlan, state: RequestState) -> tuple[StepBatch, LogitBatch]:
    """The inputs of an applied plan, and its positions of interest. It schedules a row at least."""
    scheduled = plan.scheduled
    rows, starts, counts = scheduled.rows, scheduled.start_positions, scheduled.token_counts
    query_starts = np.zeros(rows.size + 1, dtype=np.int32)
    np.cumsum(counts, out=query_starts[1:])
    token_rows = np.repeat(rows, counts)
    offsets = np.arange(query_starts[-1], dtype=np.int32) - np.repeat(query_starts[:-1], counts)
    positions = np.repeat(starts, counts) + offsets
    block_size = state.block_size
    blocks = state.block_tables[token_rows, positions // block_size]
    context_lengths = starts + counts
    used_blocks = -(-int(context_lengths.max()) // block_size)
    batch = StepBatch(
        query_starts=query_starts,
        context_lengths=context_lengths,
        block_tables=state.block_tables[rows, :used_blocks],
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        token_ids=state.token_ids[token_rows, positions],
    )
    return batch, _positions_of_interest(plan, state, batch)


def _positions_of_interest(plan: StepPlan, state: RequestState, batch: StepBatch) -> LogitBatch:
    """The last position of each row that reaches the end of its tokens and wants more than KV."""
    rows, ends = plan.scheduled.rows, batch.context_lengths
    kinds = state.end_kinds[rows]
    wanted = np.flatnonzero((ends == state.known_counts[rows]) & (kinds != 0))
    return LogitBatch(
        token_indices=batch.query_starts[1:][wanted] - 1,
        rows=rows[wanted],
        positions=ends[wanted],
        kinds=kinds[wanted],
    )
