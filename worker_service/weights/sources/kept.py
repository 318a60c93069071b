"""Tensors in host memory as they came, and several sources as one."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import torch

from worker_service.domain.weights import TensorDescription
from worker_service.load_errors import CheckpointInvalid
from worker_service.weights.sources.interface import FORMATS, Check, TensorSource, bytes_of


class KeptTensors:
    """TensorSource of tensors that did not come from files. `digests` are SHA-256 by name, for
    those that are known already."""

    def __init__(
        self, origin: str, tensors: Mapping[str, torch.Tensor], digests: Mapping[str, bytes]
    ) -> None:
        self.tensors = dict(tensors)
        self.origin = origin
        self._digests = dict(digests)

    def names(self) -> frozenset[str]:
        """See TensorSource."""
        return frozenset(self.tensors)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See TensorSource."""
        tensor = self._find(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointInvalid(
                f"{self.origin}: the tensor {name} has shape {tuple(tensor.shape)}, the model's "
                f"has {shape}"
            )
        return tensor

    def part(self, name: str, shape: tuple[int, ...], axis: int, part: range) -> torch.Tensor:
        """See TensorSource."""
        return self.tensor(name, shape).narrow(axis, part.start, len(part))

    def stored_format(self, name: str) -> str:
        """See TensorSource."""
        return FORMATS[self._find(name).dtype]

    def describe(self, names: Iterable[str], check: Check) -> dict[str, TensorDescription]:
        """See TensorSource."""
        found = {}
        for name in names:
            tensor = self._find(name)
            if name not in self._digests:
                check()
                self._digests[name] = hashlib.sha256(bytes_of(tensor).data).digest()
            shape, digest = tuple(tensor.shape), self._digests[name]
            found[name] = TensorDescription(name, FORMATS[tensor.dtype], shape, digest)
        return found

    def _find(self, name: str) -> torch.Tensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointInvalid(f"{self.origin} lacks the tensor {name}")
        return tensor


class Overlay:
    """TensorSource that takes each tensor from a source of its own: `owners` by name."""

    def __init__(self, origin: str, owners: Mapping[str, TensorSource]) -> None:
        self.origin = origin
        self._owners = owners

    def names(self) -> frozenset[str]:
        """See TensorSource."""
        return frozenset(self._owners)

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """See TensorSource."""
        return self._owner(name).tensor(name, shape)

    def part(self, name: str, shape: tuple[int, ...], axis: int, part: range) -> torch.Tensor:
        """See TensorSource."""
        return self._owner(name).part(name, shape, axis, part)

    def stored_format(self, name: str) -> str:
        """See TensorSource."""
        return self._owner(name).stored_format(name)

    def describe(self, names: Iterable[str], check: Check) -> dict[str, TensorDescription]:
        """See TensorSource."""
        by_owner: dict[int, list[str]] = {}
        for name in names:
            by_owner.setdefault(id(self._owner(name)), []).append(name)
        found: dict[str, TensorDescription] = {}
        for group in by_owner.values():
            found |= self._owner(group[0]).describe(group, check)
        return found

    def _owner(self, name: str) -> TensorSource:
        owner = self._owners.get(name)
        if owner is None:
            raise CheckpointInvalid(f"{self.origin} lacks the tensor {name}")
        return owner
