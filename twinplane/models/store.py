"""Finds, fetches and lists models: from a name to a folder that a worker can load."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from twinplane.models.cache import ModelCache
from twinplane.models.catalogue import (
    CATALOGUE,
    SIMULATED_FOLDER,
    SIMULATED_MODEL,
    WheelModel,
    find_in_catalogue,
)
from twinplane.models.errors import CacheUnusable, ModelInvalid, ModelNotFound, NotConverted
from twinplane.models.folder import (
    CONFIG_NAME,
    check_readable,
    is_file,
    is_folder,
    is_there,
    missing_file,
    missing_text_file,
    read_config,
)
from twinplane.models.gguf.conversion import CONVERSION_VERSION, convert_gguf, read_gguf
from twinplane.models.hub import (
    CheckConfig,
    find_snapshot,
    how_to_pull,
    is_hub_id,
    no_check,
    pull_snapshot,
    remove_snapshot,
    snapshots,
)
from twinplane.models.progress import Progress
from twinplane.models.wheel import Download, make_from_wheel
from twinplane.paths import NoHomeFolder, expand


@dataclass(frozen=True, slots=True)
class InstalledModel:
    """A model on this machine. `byte_count` is its size on disk. Without weights it is what a
    control plane needs of it.
    """

    name: str
    folder: Path
    byte_count: int
    architecture: str
    has_weights: bool


class ModelStore:
    """The models of one cache and one catalogue, and those of the hub library."""

    def __init__(
        self, cache: ModelCache, download: Download, catalogue: tuple[WheelModel, ...] = CATALOGUE
    ) -> None:
        self._cache = cache
        self._download = download
        self._catalogue = catalogue

    def resolve(
        self, name_or_path: str, progress: Progress, *, weights: bool = True, convert: bool = True
    ) -> Path:
        """See `twinplane.models.resolve`."""
        if name_or_path == SIMULATED_MODEL:  # ./simulated names a folder
            return SIMULATED_FOLDER
        try:
            path = Path(expand(name_or_path))
        except NoHomeFolder as error:
            raise ModelNotFound(f"no model {name_or_path!r}: {error}") from error
        if is_folder(path):
            read_config(path)
            return path
        if is_there(path):
            if path.suffix == ".gguf" and is_file(path):
                return self._converted(path.resolve(), progress, convert=convert)
            check_readable(path)
            raise ModelInvalid(
                f"{path} is neither a model folder nor a .gguf file; give the folder of a model, "
                "not a file in it"
            )
        if model := find_in_catalogue(name_or_path, self._catalogue):
            found = self._cache.find(model.name)
            missing = None if found is None else _missing(found, weights)
            if found is not None and missing is None:
                return found
            lack = "not on this machine" if found is None else f"here without {missing}"
            raise ModelNotFound(f"model {model.name} is {lack}; {how_to_pull(model.name, weights)}")
        if is_hub_id(name_or_path):
            return find_snapshot(name_or_path, weights=weights)
        raise self._unknown(name_or_path)

    def pull(
        self,
        name: str,
        progress: Progress,
        check: CheckConfig = no_check,
        *,
        weights: bool = True,
    ) -> Path:
        """See `twinplane.models.pull`."""
        if name == SIMULATED_MODEL:
            return SIMULATED_FOLDER
        if model := find_in_catalogue(name, self._catalogue):
            return self._made(
                model.name,
                lambda folder: make_from_wheel(
                    model, folder, progress, self._download, weights=weights
                ),
                weights=weights,
            )
        if is_hub_id(name):
            progress.stage("Downloading")
            return pull_snapshot(name, check, weights=weights)
        raise self._unknown(name)

    def default_sampling(self, folder: Path) -> Mapping[str, float]:
        """See `twinplane.models.default_sampling`."""
        model = find_in_catalogue(folder.name, self._catalogue)
        try:
            own = model is not None and folder.samefile(self._cache.models / model.name)
        except (OSError, CacheUnusable):
            return {}
        return model.sampling if model is not None and own else {}

    def installed(self) -> list[InstalledModel]:
        """See `twinplane.models.installed`."""
        own = [describe(folder.name, folder) for folder in self._cache.folders()]
        return own + hub_models()

    def remove(self, name: str) -> InstalledModel:
        """See `twinplane.models.remove`."""
        found = next((model for model in self.installed() if model.name == name), None)
        if found is None:
            # A folder that lost its config.json is not listed, and takes room all the same.
            if find_in_catalogue(name, self._catalogue) and self._cache.remove(name):
                return InstalledModel(name, self._cache.models / name, 0, "unknown", False)
            raise ModelNotFound(
                f"model {name} is not among those of `twinplane model list`, and nothing else is "
                "removed"
            )
        if is_hub_id(name):
            remove_snapshot(found.folder)
        else:
            self._cache.remove(name)
        return found

    def _converted(self, source: Path, progress: Progress, *, convert: bool) -> Path:
        """The cached conversion of exactly this file, made on first use. Raises NotConverted
        instead where it would be made and `convert` is off.

        The file is identified by path, size and time of change. To hash its content would take
        seconds at every start.
        """
        stat = source.stat()
        identity = f"{CONVERSION_VERSION}\0{source}\0{stat.st_size}\0{stat.st_mtime_ns}"
        digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
        stem = re.sub(r"[^a-z0-9.]+", "-", source.stem.lower()).strip("-.")[:60]
        name = f"{stem or 'model'}-{digest}"
        if not convert:
            found = self._cache.find(name)
            if found is None or missing_file(found) is not None:
                raise NotConverted(str(source), read_gguf(source).config)
            return found
        return self._made(name, lambda folder: convert_gguf(source, folder, progress), weights=True)

    def _made(self, name: str, make: Callable[[Path], None], *, weights: bool) -> Path:
        """The cached folder; made anew where files of it are missing."""
        return self._cache.get_or_make(name, make, lambda folder: _missing(folder, weights) is None)

    def _unknown(self, name: str) -> ModelNotFound:
        names = ", ".join(model.name for model in self._catalogue)
        return ModelNotFound(
            f"no model {name!r}: give a folder, a .gguf file, a hub id (org/name) or one of {names}"
        )


def _missing(folder: Path, weights: bool) -> str | None:
    return missing_file(folder) if weights else missing_text_file(folder)


def describe(name: str, folder: Path) -> InstalledModel:
    """The model in a folder, be it damaged."""
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    return InstalledModel(
        name, folder, size, _architecture(folder), has_weights=missing_file(folder) is None
    )


def _architecture(folder: Path) -> str:
    try:
        config = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        return str(config["architectures"][0])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return "unknown"


def hub_models() -> list[InstalledModel]:
    """Those of the hub library that a plane can use, with weights or without."""
    return [
        describe(name, folder)
        for name, folder in snapshots()
        if missing_file(folder) is None or missing_text_file(folder) is None
    ]
