"""Root mean square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)


class RmsNorm:
    """x / sqrt(mean(x²) + epsilon) · weight over the last dimension, the mean in float32."""

    def __init__(self, weight: torch.Tensor, epsilon: float) -> None:
        self._weight = weight
        self._epsilon = epsilon

    @property
    def byte_count(self) -> int:
        return self._weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [.., width] → a new tensor of the same shape and dtype."""
        # torch widens half formats to float32 inside.
        return F.rms_norm(x, (x.shape[-1],), self._weight, self._epsilon)
