"""The gated feed-forward block: down(silu(gate(x)) · up(x)) (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from worker_service.layers.linear import Linear


class GatedMlp:
    """`gate_up` [2 · intermediate, hidden] is the two projections stacked, gate first."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    @property
    def byte_count(self) -> int:
        return self._gate_up.byte_count + self._down.byte_count

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden] → a new tensor of the same shape."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        return self._down(F.silu(gate).mul_(up))
