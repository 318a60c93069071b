"""Grammar masks: which tokens some of the sampled rows may take. Host values, no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from worker_service.domain.columns import IntColumn
from worker_service.domain.errors import PlanInvalid
from worker_service.domain.plan import GrammarMasks


@dataclass(frozen=True, slots=True, eq=False)
class MaskBatch:
    """Masks of m of the sampled rows: `indices` int64 [m] into them; `bitmasks` uint32
    [m, ceil(vocabulary / 32)], bit t % 32 of word t / 32 allows token t."""

    indices: npt.NDArray[np.int64]
    bitmasks: npt.NDArray[np.uint32]

    def allowed(self, vocabulary_size: int) -> npt.NDArray[np.bool_]:
        """Which tokens each masked row may take, bool [m, vocabulary]."""
        octets = self.bitmasks.astype("<u4").view(np.uint8)
        return np.unpackbits(octets, axis=1, count=vocabulary_size, bitorder="little").view(bool)


def find_masks(masks: GrammarMasks, rows: IntColumn, vocabulary_size: int) -> MaskBatch:
    """Finds each masked row among the distinct `rows` int32 [n] that are sampled.

    Raises PlanInvalid for a row that is not there or comes twice, and for masks of another width.
    """
    words = -(-vocabulary_size // 32)
    if masks.bitmasks.shape != (masks.rows.size, words):
        raise PlanInvalid(
            "grammar_masks.bitmasks",
            f"{words} words for each of {masks.rows.size} rows are due",
        )
    if np.unique(masks.rows).size != masks.rows.size:
        raise PlanInvalid("grammar_masks.rows", "must be distinct")
    if not np.isin(masks.rows, rows).all():
        raise PlanInvalid("grammar_masks.rows", "must be among the rows that are sampled")
    order = np.argsort(rows)
    indices: npt.NDArray[np.int64] = order[np.searchsorted(rows, masks.rows, sorter=order)]
    return MaskBatch(indices, masks.bitmasks)
