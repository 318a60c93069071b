"""Takes the tensors that a spec names out of a checkpoint: checks, converts and stacks them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from worker_service.load_errors import CheckpointInvalid
from worker_service.model.spec import CopySpec, DecoderSpec, ProjectionSpec, TensorSpec
from worker_service.weights.checkpoint import Checkpoint

_FORMATS = ("F32", "BF16", "F16", "F64")
_NAMES_TOLD = 4
_ROWS_COMPARED = 4096


class WeightLoader:
    """Hands tensors to an executor, on `device` in `data_type`. No result keeps the map open.

    Every tensor of the checkpoint is one that the spec names, one that it ignores, or refused.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: DecoderSpec,
        data_type: torch.dtype,
        device: torch.device,
    ) -> None:
        """Raises CheckpointInvalid, naming the tensors, where the checkpoint and the spec differ or
        a tensor's format is not one that is read."""
        self._checkpoint = checkpoint
        self._data_type = data_type
        self._device = device
        self._untaken = set(spec.tensors())
        # All projections are stacked in the same memory, because fresh pages are slow to get.
        self._scratch = torch.empty(0, dtype=data_type, device=device)
        self._check(spec)

    def tensor(self, tensor: TensorSpec) -> torch.Tensor:
        """A copy of one tensor."""
        mapped = self._take(tensor)
        return mapped.to(device=self._device, dtype=self._data_type, copy=True)

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
        assert not self._untaken, f"not loaded: {_listed(each.name for each in self._untaken)}"

    def _fill(self, parts: tuple[TensorSpec, ...], out: torch.Tensor) -> None:
        """Converts the tensors into `out`, one below the other."""
        start = 0
        for part in parts:
            end = start + part.shape[0]
            out[start:end].copy_(self._take(part))
            start = end

    def _take(self, tensor: TensorSpec) -> torch.Tensor:
        self._untaken.discard(tensor)
        return self._checkpoint.tensor(tensor.name, tensor.shape)

    def _check(self, spec: DecoderSpec) -> None:
        wanted, found = spec.tensors(), self._checkpoint.names()
        names = {tensor.name for tensor in wanted}
        copies = {copy.name for copy in spec.copies} & found
        for name in sorted(found & (names | copies)):
            stored = self._checkpoint.stored_format(name)
            if stored not in _FORMATS:
                raise CheckpointInvalid(
                    f"{self._checkpoint.folder}: the tensor {name} is stored as {stored}; "
                    f"only {', '.join(_FORMATS)} are read, no quantized weights"
                )
        unknown = found - names - copies - spec.ignored
        if unknown:
            raise CheckpointInvalid(
                f"{self._checkpoint.folder}: config.json does not account for "
                f"{_listed(unknown)}; without them the model would compute something else. "
                "The files do not belong together, or this worker cannot run such a model"
            )
        for tensor in sorted(wanted, key=lambda tensor: tensor.name):
            self._checkpoint.tensor(tensor.name, tensor.shape)
        for copy in spec.copies:
            if copy.name in copies:
                self._compare(copy)

    def _compare(self, copy: CopySpec) -> None:
        original = self._checkpoint.tensor(copy.original.name, copy.original.shape)
        second = self._checkpoint.tensor(copy.name, copy.original.shape)
        for start in range(0, original.shape[0], _ROWS_COMPARED):
            rows = slice(start, start + _ROWS_COMPARED)
            if not torch.equal(original[rows].double(), second[rows].double()):
                raise CheckpointInvalid(
                    f"{self._checkpoint.folder}: config.json ties {copy.name} to "
                    f"{copy.original.name}, but the two differ"
                )


def _listed(names: Iterable[str]) -> str:
    """The first few names and the number of the others."""
    ordered = sorted(names)
    told = ", ".join(ordered[:_NAMES_TOLD])
    rest = len(ordered) - _NAMES_TOLD
    kind = "the tensor" if len(ordered) == 1 else "the tensors"
    return f"{kind} {told}" + (f" and {rest} more" if rest > 0 else "")
