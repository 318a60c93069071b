"""Which of a step's positions are of interest: those whose logits are computed and used."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from worker_service.domain.columns import IntColumn

BoolColumn = npt.NDArray[np.bool_]
KindColumn = npt.NDArray[np.int8]


class LogitKind(IntEnum):
    """How one position's logits are used. What a sequence asked for when it was added decides the
    kinds of its positions."""

    SAMPLE = 1
    """The next token is sampled within the step."""
    HOLD = 2
    """The logits wait for Sample."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitBatch:
    """L positions of interest, any number of each row, in the order of the step's tokens.

    `token_indices` int32 [L], into the step's tokens; `rows` int32 [L], of the persistent batch;
    `positions` int32 [L], the position of the token that the logits predict, one behind the
    position that was computed; `kinds` int8 [L], values of LogitKind.
    """

    token_indices: IntColumn
    rows: IntColumn
    positions: IntColumn
    kinds: KindColumn

    def are(self, kind: LogitKind) -> BoolColumn:
        """Which positions are of a kind, bool [L]."""
        members: BoolColumn = self.kinds == kind
        return members

    def take(self, members: BoolColumn) -> LogitBatch:
        """The positions that a mask [L] selects."""
        return LogitBatch(
            self.token_indices[members],
            self.rows[members],
            self.positions[members],
            self.kinds[members],
        )
