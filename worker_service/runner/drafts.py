"""Drafts: tokens that a step computes before they are known to be right, and verifies.

A row with d drafts gets logits at d + 1 positions: behind its last token and behind each draft. The
token sampled at each is the one that would have been sampled there anyway. A draft is accepted when
it equals the token sampled in its place; the first that differs ends the row's tokens of the step.
"""

from __future__ import annotations

import numpy as np

from worker_service.domain.batch import StepBatch
from worker_service.domain.columns import IntColumn
from worker_service.runner.logit_batch import BoolColumn, LogitBatch


class AcceptedDrafts:
    """How many drafts each row's latest steps accepted, for plans made before that was known.

    It reaches `step_count` steps back. Steps that verified nothing need no record.
    """

    def __init__(self, row_count: int, step_count: int) -> None:
        # A step's entry is at its id modulo step_count; step ids outgrow int32 in a long life.
        self._steps = np.zeros((row_count, step_count), dtype=np.int64)
        self._counts = np.zeros((row_count, step_count), dtype=np.int32)

    def record(self, rows: IntColumn, step_id: int, counts: IntColumn) -> None:
        """Row by row, how many drafts a step accepted: int32 [n] each."""
        place = step_id % self._steps.shape[1]
        self._steps[rows, place] = step_id
        self._counts[rows, place] = counts

    def since(self, rows: IntColumn, step_id: int, distances: IntColumn) -> IntColumn:
        """How many drafts each row accepted in steps from step_id - distance on, int32 [n].

        0 for a distance of 0.
        """
        firsts = step_id - distances.astype(np.int64)
        own = self._steps[rows]
        counted = (own >= firsts[:, None]) & (own < step_id)
        accepted: IntColumn = np.where(counted, self._counts[rows], 0).sum(axis=1, dtype=np.int32)
        return accepted

    def forget(self, rows: IntColumn) -> None:
        """Forgets the rows' records, because the rows get other sequences."""
        self._steps[rows] = 0


def kept_tokens(
    batch: StepBatch, interest: LogitBatch, tokens: IntColumn
) -> tuple[BoolColumn, IntColumn, IntColumn]:
    """Verifies the drafts of a step against `tokens` int32 [L], sampled at its positions of
    interest. There is at least one.

    Returns which tokens are kept, bool [L]; the rows, int32 [n], in order; and how many tokens each
    keeps, int32 [n]: its accepted drafts and one more.
    """
    changes = interest.rows[1:] != interest.rows[:-1]
    starts = np.flatnonzero(np.concatenate(([True], changes)))
    inner = np.flatnonzero(~np.concatenate((changes, [True])))
    differs = np.ones(tokens.size, dtype=bool)
    differs[inner] = tokens[inner] != batch.token_ids[interest.token_indices[inner] + 1]
    differences_before = np.cumsum(differs) - differs
    lengths = np.diff(np.append(starts, tokens.size))
    kept: BoolColumn = differences_before == np.repeat(differences_before[starts], lengths)
    return kept, interest.rows[starts], np.add.reduceat(kept, starts, dtype=np.int32)
