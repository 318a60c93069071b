"""Which of a step's positions are of interest: they get logits, and something becomes of each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from worker_service.domain.columns import IntColumn

BoolColumn = npt.NDArray[np.bool_]
KindColumn = npt.NDArray[np.int8]


class LogitKind(IntEnum):
    """What becomes of one position's logits. What a sequence asked for when it was added decides
    the kinds of its positions."""

    SAMPLE = 1
    """The next token is sampled within the step."""
    HOLD = 2
    """They wait for Sample."""


@dataclass(frozen=True, slots=True, eq=False)
class LogitBatch:
    """L positions of interest, any number of each row, in the order of the step's tokens.

    `token_indices` int32 [L], into the step's tokens; `rows` int32 [L], of the persistent batch;
    `positions` int32 [L], each that of the token which its logits are about: one behind the
    position computed; `kinds` int8 [L], values of LogitKind.
    """

    token_indices: IntColumn
    rows: IntColumn
    positions: IntColumn
    kinds: KindColumn

    def are(self, kind: LogitKind) -> BoolColumn:
        """Which are of a kind, bool [L]."""
        members: BoolColumn = self.kinds == kind
        return members

    def take(self, members: BoolColumn) -> LogitBatch:
        """Some of them, by a mask [L]."""
        return LogitBatch(
            self.token_indices[members],
            self.rows[members],
            self.positions[members],
            self.kinds[members],
        )
