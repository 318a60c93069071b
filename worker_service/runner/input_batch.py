"""One step's inputs, gathered from the persistent batch without a loop over rows or tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from worker_service.domain.columns import IntColumn
from worker_service.domain.plan import StepPlan
from worker_service.runner.request_state import RequestState


@dataclass(frozen=True, slots=True, eq=False)
class InputBatch:
    """Inputs of one step of R rows and T tokens, all int32 on the host.

    `rows` [R]; `query_lengths` [R], tokens per row; `query_starts` [R + 1], their prefix sum;
    `context_lengths` [R], tokens attended to, the scheduled ones included; `token_ids`,
    `positions`, `slots` [T]; `block_tables` [R, blocks of the longest context]; `logit_indices`
    [S], the token index of each sampled row's last token; `sampled_rows` [S];
    `sampled_positions` [S], the position the sampled token will have.
    """

    rows: IntColumn
    query_lengths: IntColumn
    query_starts: IntColumn
    context_lengths: IntColumn
    token_ids: IntColumn
    positions: IntColumn
    slots: IntColumn
    block_tables: IntColumn
    logit_indices: IntColumn
    sampled_rows: IntColumn
    sampled_positions: IntColumn

    @property
    def token_count(self) -> int:
        return int(self.token_ids.size)


def prepare(plan: StepPlan, state: RequestState) -> InputBatch:
    """Builds the inputs of an applied plan. The plan schedules at least one row."""
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
    sampling = state.sampling_indices(plan)
    return InputBatch(
        rows=rows,
        query_lengths=counts,
        query_starts=query_starts,
        context_lengths=context_lengths,
        token_ids=state.token_ids[token_rows, positions],
        positions=positions,
        slots=blocks * block_size + positions % block_size,
        block_tables=state.block_tables[rows, :used_blocks],
        logit_indices=query_starts[1:][sampling] - 1,
        sampled_rows=rows[sampling],
        sampled_positions=context_lengths[sampling],
    )
