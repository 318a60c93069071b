"""Adapters in PEFT's format, from a folder or as they are streamed: checked, then read.

Needs no torch, so that a simulated worker reads them too. What an adapter has, in which shape and
format, is known and checked before any of its numbers is kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from worker_service.domain.adapters import (
    Adapter,
    AdapterDescription,
    AdapterLimits,
    LowRankPair,
    StoredTensor,
)
from worker_service.domain.errors import SourceLost, UpdateInvalid
from worker_service.domain.weights import TensorDescription
from worker_service.weights.adapter_config import (
    MAX_CONFIG_BYTES,
    AdapterConfig,
    last_names,
    read_adapter_config,
    shown,
)

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
# Bits of the exponent: all of them are set in an infinity or a NaN. For each format that is read.
_EXPONENTS: Mapping[str, tuple[str, int]] = MappingProxyType(
    {"F32": ("<u4", 0x7F800000), "BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00)}
)

Modules = Mapping[str, tuple[int, int]]
"""Every projection of the model that can be adapted, with its outputs and inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class AdapterOutline:
    """An adapter without its numbers: it fits the model. `tensors` in the order that was given."""

    config: AdapterConfig
    tensors: tuple[TensorDescription, ...]
    modules: tuple[str, ...]

    @property
    def byte_count(self) -> int:
        """What the tensors' numbers take."""
        return sum(tensor.byte_count for tensor in self.tensors)

    def buffers(self) -> list[bytearray]:
        """Room for each tensor's bytes."""
        return [bytearray(tensor.byte_count) for tensor in self.tensors]

    def finish(self, buffers: Sequence[bytearray]) -> Adapter:
        """The adapter with its numbers. Raises UpdateInvalid where they are not finite, or not
        those that were announced."""
        stored = {}
        for tensor, data in zip(self.tensors, buffers, strict=True):
            assert len(data) == tensor.byte_count
            digest = hashlib.sha256(data).digest()
            if tensor.sha256 and tensor.sha256 != digest:
                raise UpdateInvalid(tensor.name, "its bytes have another SHA-256 than announced")
            _require_finite(tensor, data)
            known = replace(tensor, sha256=digest)
            stored[tensor.name] = StoredTensor(known, data)
        config = self.config
        pairs = {
            module: LowRankPair(
                stored[_PREFIX + module + _A],
                stored[_PREFIX + module + _B],
                config.scale_of(module),
            )
            for module in self.modules
        }
        description = AdapterDescription(
            _digest(pairs), config.rank, config.scale, last_names(self.modules)
        )
        return Adapter(description, pairs)


def outline_adapter(
    config_json: str,
    tensors: Sequence[TensorDescription],
    modules: Modules | None,
    limits: AdapterLimits,
) -> AdapterOutline:
    """Checks what an adapter says of itself against the model and the slots.

    `modules` None: a model without projections of its own, which takes whatever fits together.
    Raises UpdateInvalid, which names the key or the tensor.
    """
    config = read_adapter_config(config_json)
    given: dict[str, TensorDescription] = {}
    for tensor in tensors:
        if tensor.name in given:
            raise UpdateInvalid(shown(tensor.name), "is there twice")
        if tensor.number_format not in _EXPONENTS:
            raise UpdateInvalid(
                shown(tensor.name),
                f"is stored as {tensor.number_format}; only {', '.join(_EXPONENTS)} are read",
            )
        given[tensor.name] = tensor
    if modules is None:
        wanted = sorted(_modules_of(given))
    else:
        wanted = _wanted(config, modules, given)
    for module in wanted:
        _check_pair(module, config.rank_of(module), limits, given, modules)
    expected = {_PREFIX + module + end for module in wanted for end in (_A, _B)}
    if unknown := sorted(given.keys() - expected):
        raise UpdateInvalid(
            shown(unknown[0]),
            "is no tensor of a projection that target_modules names" + _and_more(len(unknown) - 1),
        )
    return AdapterOutline(config, tuple(tensors), tuple(sorted(wanted)))


def read_adapter(folder: Path, modules: Modules | None, limits: AdapterLimits) -> Adapter:
    """The adapter in a folder. Raises UpdateInvalid or, where it can't be read, SourceLost."""
    config_json = _read_text(folder / CONFIG_NAME)
    path = folder / TENSORS_NAME
    if not path.is_file():
        raise UpdateInvalid("update.disk.path", f"the folder has no {TENSORS_NAME}")
    outline = outline_adapter(config_json, _described(path), modules, limits)
    return outline.finish(_read_tensors(path, outline))


def _wanted(
    config: AdapterConfig, modules: Modules, given: Mapping[str, TensorDescription]
) -> list[str]:
    """The modules that the config means. Raises UpdateInvalid where it means none, or others than
    those of the model's layers."""
    named = _modules_of(given)
    wanted = [module for module in modules if config.wants(module)]
    if config.is_by_pattern:
        wanted = [module for module in wanted if module in named]
    for end in ("embed_tokens", "lm_head"):
        if end in config.targets or end in last_names(named):
            raise UpdateInvalid(
                "config_json.target_modules",
                f"{end} is refused: embedding and head are shared by all rows of a step",
            )
    if not wanted:
        raise UpdateInvalid(
            "config_json.target_modules",
            "names no projection of this model, which has "
            f"{', '.join(last_names(modules))} in each layer",
        )
    for target in config.targets:
        if not any(module == target or module.endswith(f".{target}") for module in modules):
            raise UpdateInvalid(
                "config_json.target_modules", f"{shown(target)} is no projection of this model"
            )
    return wanted


def _check_pair(
    module: str,
    rank: int,
    limits: AdapterLimits,
    given: Mapping[str, TensorDescription],
    modules: Modules | None,
) -> None:
    names = [_PREFIX + module + end for end in (_A, _B)]
    for name in names:
        if name not in given:
            raise UpdateInvalid(shown(name), "is missing")
    if rank > limits.max_rank:
        raise UpdateInvalid(
            shown(names[0]),
            f"has rank {rank}; a slot holds {limits.max_rank} at most: start the worker with a "
            "higher --max-lora-rank",
        )
    a, b = (given[name] for name in names)
    if modules is None:
        shapes = [(rank, a.shape[-1] if a.shape else 0), (b.shape[0] if b.shape else 0, rank)]
    else:
        outputs, inputs = modules[module]
        shapes = [(rank, inputs), (outputs, rank)]
    for tensor, shape in zip((a, b), shapes, strict=True):
        if tensor.shape != shape or 0 in shape:
            raise UpdateInvalid(
                shown(tensor.name),
                f"has shape {list(tensor.shape)}; the model and rank {rank} want {list(shape)}",
            )


def _modules_of(names: Iterable[str]) -> set[str]:
    """The modules that tensors' names are about."""
    found = set()
    for name in names:
        for end in (_A, _B):
            if name.startswith(_PREFIX) and name.endswith(end):
                found.add(name[len(_PREFIX) : -len(end)])
    return found


def _require_finite(tensor: TensorDescription, data: bytearray) -> None:
    kind, exponent = _EXPONENTS[tensor.number_format]
    bits = np.frombuffer(data, dtype=kind)
    if ((bits & exponent) == exponent).any():
        raise UpdateInvalid(shown(tensor.name), "has numbers that are not finite")


def _digest(pairs: Mapping[str, LowRankPair]) -> str:
    """Over what decides results: each module's scale, and its tensors by format, shape and bytes.
    What a config says of training, and the order of tensors in a file, do not count."""
    told = []
    for module, pair in sorted(pairs.items()):
        tensors = [
            (each.number_format, list(each.shape), each.sha256.hex())
            for each in (pair.a.description, pair.b.description)
        ]
        told.append((module, pair.scale.hex(), tensors))
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(4 * MAX_CONFIG_BYTES + 1).decode("utf-8")
    except FileNotFoundError as error:
        raise UpdateInvalid("update.disk.path", f"the folder has no {path.name}") from error
    except UnicodeDecodeError as error:
        raise UpdateInvalid("config_json", "is no UTF-8 text") from error
    except OSError as error:
        raise SourceLost(f"{path.name} can't be read: {error.strerror}") from error


def _described(path: Path) -> list[TensorDescription]:
    """What a safetensors file holds, from its header alone."""
    # Not at the top: a simulated worker runs without the library until it is given an adapter.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            found = []
            for name in file.keys():  # noqa: SIM118 (no mapping)
                entry = file.get_slice(name)
                shape = tuple(entry.get_shape())
                found.append(TensorDescription(name, str(entry.get_dtype()), shape))
            return found
    except SafetensorError as error:
        raise _unreadable(error) from error
    except OSError as error:
        raise SourceLost(f"{TENSORS_NAME} can't be read: {error}") from error


def _read_tensors(path: Path, outline: AdapterOutline) -> list[bytearray]:
    """The bytes of a file that was outlined. Raises UpdateInvalid where it is another by now."""
    import safetensors

    read: Callable[[bytes], Iterable[tuple[str, Mapping[str, Any]]]] = safetensors.deserialize
    try:
        entries = dict(read(path.read_bytes()))
    except safetensors.SafetensorError as error:
        raise _unreadable(error) from error
    except OSError as error:
        raise SourceLost(f"{TENSORS_NAME} can't be read: {error}") from error
    buffers = []
    for tensor in outline.tensors:
        entry = entries.get(tensor.name)
        found = None if entry is None else (entry["dtype"], tuple(entry["shape"]))
        if entry is None or found != (tensor.number_format, tensor.shape):
            raise UpdateInvalid("update.disk.path", f"{TENSORS_NAME} was changed while it was read")
        buffers.append(bytearray(entry["data"]))
    return buffers


def _unreadable(error: Exception) -> UpdateInvalid:
    text = " ".join(str(error).split())
    return UpdateInvalid("update.disk.path", f"{TENSORS_NAME} is no sound safetensors file: {text}")


def _and_more(count: int) -> str:
    if not count:
        return ""
    return f"; so are {count} others" if count > 1 else "; so is another"
