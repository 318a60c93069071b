"""A pair of low-rank matrices as every executor takes it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """scale · B (A x): `a` [rank, inputs], `b` [outputs, rank], on the host in the formats that the
    adapter came in."""

    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]
