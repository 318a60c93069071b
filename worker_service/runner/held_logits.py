"""Logits that wait for Sample, row by row."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from worker_service.domain.columns import IntColumn


class HeldLogits:
    """One row of logits for each held row of the persistent batch. RequestState knows which rows
    are held. Only held rows cost memory."""

    def __init__(self) -> None:
        self._logits: dict[int, torch.Tensor] = {}

    def hold(self, rows: IntColumn, logits: torch.Tensor) -> None:
        """Keeps copies of logits [n, vocabulary] for `rows` int32 [n]."""
        self._logits.update(zip(rows.tolist(), logits.clone(), strict=True))

    def take(self, rows: IntColumn) -> torch.Tensor:
        """Returns logits [n, vocabulary] of held rows, in order, and forgets those rows."""
        return torch.stack([self._logits.pop(row) for row in rows.tolist()])

    def drop(self, rows: Iterable[int]) -> None:
        """Forgets rows, held or not."""
        if self._logits:
            for row in rows:
                self._logits.pop(row, None)

    def clear(self) -> None:
        """Forgets every row."""
        self._logits.clear()
