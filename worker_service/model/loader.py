"""Takes the tensors that a spec names out of a checkpoint: converts and stacks them."""

from __future__ import annotations

import torch

from worker_service.load_errors import CheckpointInvalid
from worker_service.model.accounting import listed
from worker_service.model.share import DecoderShare
from worker_service.model.spec import DecoderSpec, ProjectionSpec, TensorSpec
from worker_service.weights.sources.interface import TensorSource


class WeightLoader:
    """Hands tensors to an executor, on `device` in `data_type`. No result keeps the map open.

    `spec` is one that account_for has settled, or a rank's share of it. Every method raises
    CheckpointInvalid for a tensor with numbers that `data_type` cannot hold.
    """

    def __init__(
        self,
        source: TensorSource,
        spec: DecoderSpec | DecoderShare,
        data_type: torch.dtype,
        device: torch.device,
    ) -> None:
        self._source = source
        self._data_type = data_type
        self._device = device
        self._untaken = set(spec.tensors())
        # All projections are stacked in the same memory, because fresh pages are slow to get.
        self._scratch = torch.empty(0, dtype=data_type, device=device)

    def tensor(self, tensor: TensorSpec) -> torch.Tensor:
        """A copy of one tensor."""
        copy = torch.empty(tensor.shape, dtype=self._data_type, device=self._device)
        self._fill((tensor,), copy)
        return copy

    def projection(self, projection: ProjectionSpec) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stacked weight [rows, inputs], valid until the next call, and the bias [rows]."""
        rows, inputs = projection.output_count, projection.input_count
        bias = None
        if projection.biases:
            bias = torch.empty(rows, dtype=self._data_type, device=self._device)
            self._fill(projection.biases, bias)
        if self._scratch.numel() < rows * inputs:
            self._scratch = self._scratch.new_empty(rows * inputs)
        weight = self._scratch[: rows * inputs].view(rows, inputs)
        self._fill(projection.weights, weight)
        return weight, bias

    def finish(self) -> None:
        """Asserts that the executor took every tensor that the spec names."""
        assert not self._untaken, f"not loaded: {listed(each.name for each in self._untaken)}"

    def _fill(self, parts: tuple[TensorSpec, ...], out: torch.Tensor) -> None:
        """Converts the tensors into `out`, one below the other."""
        start = 0
        for part in parts:
            self._untaken.discard(part)
            stored = self._stored(part)
            end = start + part.shape[0]
            target = out[start:end].copy_(stored)
            self._check_range(part.name, stored, target)
            start = end

    def _stored(self, tensor: TensorSpec) -> torch.Tensor:
        cut, shape = tensor.cut, tensor.stored_shape
        if cut is None:
            return self._source.tensor(tensor.name, shape)
        part = range(cut.start, cut.start + tensor.shape[cut.axis])
        return self._source.part(tensor.name, shape, cut.axis, part)

    def _check_range(self, name: str, stored: torch.Tensor, target: torch.Tensor) -> None:
        """Refuses numbers that became infinite; those that were stored so are the model's own."""
        if torch.finfo(stored.dtype).max <= torch.finfo(target.dtype).max:
            return
        infinite = target.isinf()
        if infinite.any() and stored.to(target.device)[infinite].isfinite().any():
            kind = str(self._data_type).removeprefix("torch.")
            raise CheckpointInvalid(
                f"{self._source.origin}: the tensor {name} holds numbers that are too large "
                f"for {kind}; serve the model in another format by --dtype"
            )
