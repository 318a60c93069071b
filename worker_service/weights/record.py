"""Where the tensors of a weight version are, so that they can be read again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from worker_service.domain.weights import TensorDescription
from worker_service.load_errors import CheckpointInvalid
from worker_service.weights.checkpoint import Checkpoint, FileStamp
from worker_service.weights.content import content_digest
from worker_service.weights.sources.interface import Check, TensorSource, no_check
from worker_service.weights.sources.kept import KeptTensors, Overlay


@dataclass(frozen=True, slots=True)
class FolderPlace:
    """A model folder, and what its weight files were when they were read."""

    folder: Path
    stamps: tuple[FileStamp, ...]


Place = FolderPlace | torch.Tensor
"""Where a tensor is: in a folder's files, or here, in host memory as it came."""


@dataclass(frozen=True, slots=True, eq=False)
class WeightsRecord:
    """The tensors of a version by name: what each is, with its digest, and where. `config` has the
    bytes of config.json."""

    config: bytes
    descriptions: Mapping[str, TensorDescription]
    places: Mapping[str, Place]

    @property
    def digest(self) -> str:
        """See content_digest."""
        return content_digest(self.config, self.descriptions.values())

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """The tensors that are in host memory."""
        return {
            name: place for name, place in self.places.items() if isinstance(place, torch.Tensor)
        }

    @property
    def kept_bytes(self) -> int:
        """What those take."""
        return sum(tensor.nbytes for tensor in self.kept.values())

    @contextmanager
    def open(self, check: Check = no_check) -> Iterator[TensorSource]:
        """The tensors. Raises CheckpointInvalid where files are not what they were, and at the end
        where they were changed meanwhile."""
        digests = {name: each.sha256 for name, each in self.descriptions.items()}
        kept = KeptTensors("the weights that this worker keeps", self.kept, digests)
        owners: dict[str, TensorSource] = dict.fromkeys(kept.tensors, kept)
        checkpoints = []
        with ExitStack() as stack:
            for place in {each for each in self.places.values() if isinstance(each, FolderPlace)}:
                checkpoint = stack.enter_context(Checkpoint(place.folder, mapped=False))
                checkpoints.append(checkpoint)
                names = [name for name, each in self.places.items() if each == place]
                self._require_unchanged(checkpoint, place, names, check)
                owners |= dict.fromkeys(names, checkpoint)
            yield Overlay("the live weights", owners)
            for checkpoint in checkpoints:
                checkpoint.require_unchanged()

    def _require_unchanged(
        self, checkpoint: Checkpoint, place: FolderPlace, names: list[str], check: Check
    ) -> None:
        if checkpoint.opened == place.stamps:
            return
        found = checkpoint.describe(names, check)
        if any(found[name] != self.descriptions[name] for name in names):
            raise CheckpointInvalid(
                f"{place.folder}: the files are others than those that were loaded from here; "
                "put those back, or send a whole update"
            )


def places_of(source: TensorSource, names: Iterable[str]) -> dict[str, Place]:
    """Where a source's tensors stay when it is closed."""
    if isinstance(source, KeptTensors):
        return {name: source.tensors[name] for name in names}
    assert isinstance(source, Checkpoint), "a source that is neither files nor memory"
    return dict.fromkeys(names, FolderPlace(source.folder, source.opened))
