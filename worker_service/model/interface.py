"""What the runner asks of a model."""

from __future__ import annotations

from typing import Protocol

import torch

from worker_service.attention.interface import StepAttention
from worker_service.model.config import ModelConfig


class Model(Protocol):
    """A decoder with its weights on one device."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def weights_bytes(self) -> int:
        """Memory of weights and tables, packed copies included."""
        ...

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        logit_indices: torch.Tensor,
    ) -> torch.Tensor:
        """Runs one step of T tokens: writes their KV and returns logits.

        `token_ids`, `positions` int64 [T], positions counted within each sequence;
        `logit_indices` int64 [S], the tokens whose logits are wanted. Returns [S, vocabulary] in
        the model's dtype; with S = 0 the head is not run.
        """
        ...
