"""Takes a model's tensors out of a checkpoint: converts, stacks, packs, and lets the map go."""

from __future__ import annotations

import torch

from worker_service.layers.linear import Linear, make_linear
from worker_service.layers.norm import RmsNorm
from worker_service.weights.checkpoint import Checkpoint


class WeightLoader:
    """Builds layers from named tensors, on `device` in `data_type`; no result keeps the map open.

    Every method raises CheckpointInvalid when a tensor is missing or has another shape.
    """

    def __init__(
        self, checkpoint: Checkpoint, data_type: torch.dtype, device: torch.device
    ) -> None:
        self._checkpoint = checkpoint
        self._data_type = data_type
        self._device = device
        # Every projection is stacked in the same memory: fresh pages are slow to come by.
        self._scratch = torch.empty(0, dtype=data_type, device=device)

    def parameter(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A copy of one tensor."""
        mapped = self._checkpoint.tensor(name, shape)
        return mapped.to(device=self._device, dtype=self._data_type, copy=True)

    def norm(self, name: str, size: int, epsilon: float) -> RmsNorm:
        return RmsNorm(self.parameter(f"{name}.weight", (size,)), epsilon)

    def linear(self, outputs: dict[str, int], inputs: int, bias: bool) -> Linear:
        """One projection of the stacked outputs: `outputs` maps module names to row counts."""
        weight, biases = self.stack(outputs, inputs, bias)
        return make_linear(weight, biases, shared=False)

    def stack(
        self, outputs: dict[str, int], inputs: int, bias: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Weights [rows, inputs], valid until the next call, and biases [rows] of the modules
        named by `outputs`, with their row counts, one below the other."""
        rows = sum(outputs.values())
        biases = None
        if bias:
            biases = torch.empty(rows, dtype=self._data_type, device=self._device)
            self._fill({f"{name}.bias": (count,) for name, count in outputs.items()}, biases)
        if self._scratch.numel() < rows * inputs:
            self._scratch = self._scratch.new_empty(rows * inputs)
        weight = self._scratch[: rows * inputs].view(rows, inputs)
        self._fill({f"{name}.weight": (count, inputs) for name, count in outputs.items()}, weight)
        return weight, biases

    def _fill(self, parts: dict[str, tuple[int, ...]], out: torch.Tensor) -> None:
        """Converts the named tensors into `out`, one below the other."""
        start = 0
        for name, shape in parts.items():
            out[start : start + shape[0]].copy_(self._checkpoint.tensor(name, shape))
            start += shape[0]
