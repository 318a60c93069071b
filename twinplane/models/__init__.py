"""Models on disk: from a name to a folder that a worker can load. No torch.

Importing this package is cheap; numpy, gguf and tokenizers are imported when a GGUF file is
converted, huggingface_hub when a hub id is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from twinplane.models.cache import ModelCache, cache_root
from twinplane.models.catalogue import (
    CATALOGUE,
    SIMULATED_MODEL,
    SMOLLM2_135M_INSTRUCT,
    WheelModel,
)
from twinplane.models.errors import (
    CacheUnusable,
    ConversionUnsupported,
    HashMismatch,
    ModelError,
    ModelInvalid,
    ModelNotFound,
    ModelRefused,
    NotConverted,
    PullFailed,
)
from twinplane.models.facts import ModelFacts, read_facts
from twinplane.models.hub import no_check
from twinplane.models.progress import NoProgress, Progress
from twinplane.models.store import InstalledModel, ModelStore
from twinplane.models.wheel import download_wheel

DEFAULT_MODEL = SMOLLM2_135M_INSTRUCT.name

__all__ = [
    "CATALOGUE",
    "DEFAULT_MODEL",
    "SIMULATED_MODEL",
    "CacheUnusable",
    "ConversionUnsupported",
    "HashMismatch",
    "InstalledModel",
    "ModelError",
    "ModelFacts",
    "ModelInvalid",
    "ModelNotFound",
    "ModelRefused",
    "NoProgress",
    "NotConverted",
    "Progress",
    "PullFailed",
    "WheelModel",
    "cache_root",
    "default_sampling",
    "facts",
    "installed",
    "no_check",
    "pull",
    "remove",
    "resolve",
]


def resolve(
    name_or_path: str,
    progress: Progress | None = None,
    *,
    weights: bool = True,
    convert: bool = True,
) -> Path:
    """The folder of a model: config.json, safetensors, tokenizer files.

    Without `weights`, as for a control plane, one that has only the rest will do.

    A folder is returned as it is, and so is the built-in one of the simulated model. A .gguf file
    is converted into the cache the first time. A catalogue name or a hub id (`org/name`,
    `org/name@revision`) is looked up on this machine only. The call blocks; a first conversion
    takes seconds to minutes, and with `convert` off it is only checked. Raises ModelNotFound (its
    message says how to get the model), NotConverted, ModelInvalid, ConversionUnsupported or
    CacheUnusable.
    """
    return _store().resolve(
        name_or_path, progress or NoProgress(), weights=weights, convert=convert
    )


def pull(
    name: str,
    progress: Progress | None = None,
    check: Callable[[Path], None] = no_check,
    *,
    weights: bool = True,
) -> Path:
    """Fetches a catalogue model or a hub id, unless it is here already. Returns its folder.

    Without `weights`, only what a control plane needs is kept, and of a hub id also fetched.
    `check` is called with a folder that holds a hub model's config.json, before its weights are
    fetched; what it raises ends the pull. Several processes may call this at once. Raises
    PullFailed, HashMismatch, CacheUnusable, what a conversion raises, and ModelNotFound for a name
    that is neither. Nothing is left behind then.
    """
    return _store().pull(name, progress or NoProgress(), check, weights=weights)


def facts(name_or_path: str) -> ModelFacts:
    """What a model on this machine is, by its files. Raises ModelNotFound, ModelInvalid."""
    return read_facts(name_or_path, resolve(name_or_path, weights=False))


def remove(name: str) -> InstalledModel:
    """Removes a model that `installed` lists, by its name there. Returns what it was.

    A process that has it loaded goes on. Raises ModelNotFound or CacheUnusable.
    """
    return _store().remove(name)


def installed() -> list[InstalledModel]:
    """Models on this machine: those of the cache, then those of the hub library."""
    return _store().installed()


def default_sampling(folder: Path) -> Mapping[str, float]:
    """How the catalogue wants the model of a folder sampled, by parameter; empty for others.

    `folder` is what `resolve` has returned. It is for models whose files say nothing about it.
    """
    return _store().default_sampling(folder)


def _store() -> ModelStore:
    return ModelStore(ModelCache(cache_root), download_wheel)
