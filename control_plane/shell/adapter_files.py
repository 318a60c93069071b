"""An adapter's folder as PEFT writes one: what the control plane has to know of it.

That is its digest, as adapters.proto defines it, and where its tensors are. Whether the adapter
fits a model is the worker's to judge: it reads the same files, as they are streamed to it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_NAME = "adapter_config.json"
TENSORS_NAME = "adapter_model.safetensors"
_MAX_CONFIG_BYTES = 1024 * 1024
_MAX_HEADER_BYTES = 16 * 1024 * 1024
_LENGTH_BYTES = 8
_READ_BYTES = 1024 * 1024
_PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_FORMATS = ("F32", "BF16", "F16")
"""As a safetensors file names them."""


class AdapterUnreadable(Exception):
    """The folder has no adapter that could be served; says why."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """An adapter in a folder, as it was when it was read. `sha256`: of each tensor's bytes, by its
    name; whoever loads it checks that they are still the same."""

    folder: str
    digest: str
    config_json: str
    sha256: tuple[tuple[str, bytes], ...]

    @property
    def tensors_path(self) -> str:
        """The safetensors file."""
        return str(Path(self.folder) / TENSORS_NAME)


def read_adapter_files(folder: str) -> AdapterFiles:
    """Reads and hashes a folder; takes as long as reading its bytes. Raises AdapterUnreadable."""
    path = Path(folder).expanduser()
    try:
        with (path / CONFIG_NAME).open("rb") as file:
            config_json = file.read(_MAX_CONFIG_BYTES + 1).decode()
        if len(config_json) > _MAX_CONFIG_BYTES:
            raise AdapterUnreadable(f"{CONFIG_NAME} has more than {_MAX_CONFIG_BYTES} bytes")
        config = json.loads(config_json)
        if not isinstance(config, dict):
            raise AdapterUnreadable(f"{CONFIG_NAME} is no JSON object")
        told = _tensors(path / TENSORS_NAME)
        digest = _digest(config, told)
    except FileNotFoundError as error:
        name = Path(str(error.filename)).name
        raise AdapterUnreadable(f"{str(path)!r} has no {name}") from error
    except OSError as error:
        raise AdapterUnreadable(f"{str(path)!r} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise AdapterUnreadable(f"{str(path)!r} has no adapter that can be read") from error
    sha256 = tuple((name, sha) for name, (_, _, sha) in told.items())
    return AdapterFiles(str(path.absolute()), digest, config_json, sha256)


_Told = Mapping[str, tuple[str, list[int], bytes]]
"""Format, shape and SHA-256 of each tensor."""


def _tensors(path: Path) -> _Told:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if not 2 <= length <= min(_MAX_HEADER_BYTES, size):
            raise AdapterUnreadable(f"{TENSORS_NAME} is no safetensors file")
        header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        told = {}
        for name, entry in header.items():
            if entry["dtype"] not in _FORMATS:
                raise AdapterUnreadable(f"{name} is of format {entry['dtype']}")
            start, end = entry["data_offsets"]
            if not 0 <= start <= end <= size - _LENGTH_BYTES - length:
                raise AdapterUnreadable(f"{name} lies outside {TENSORS_NAME}")
            file.seek(_LENGTH_BYTES + length + start)
            sha = hashlib.sha256()
            while start < end:
                data = file.read(min(_READ_BYTES, end - start))
                if not data:
                    raise AdapterUnreadable(f"{TENSORS_NAME} ends early")
                sha.update(data)
                start += len(data)
            told[name] = (entry["dtype"], list(entry["shape"]), sha.digest())
    if not told:
        raise AdapterUnreadable(f"{TENSORS_NAME} has no tensors")
    return told


def _digest(config: Mapping[str, Any], told: _Told) -> str:
    """See AdapterDescription.digest."""
    modules = []
    for name in sorted(told):
        if not (name.startswith(_PREFIX) and name.endswith(_A)):
            continue
        module = name[len(_PREFIX) : -len(_A)]
        other = f"{_PREFIX}{module}{_B}"
        if other not in told:
            raise AdapterUnreadable(f"{other} is missing")
        pair = [
            (data_type, shape, sha.hex()) for data_type, shape, sha in (told[name], told[other])
        ]
        modules.append((module, _scale(config, module).hex(), pair))
    if 2 * len(modules) != len(told):
        raise AdapterUnreadable("it has tensors that are no low-rank matrices of a projection")
    modules.sort(key=lambda each: each[0])
    return hashlib.sha256(json.dumps(modules).encode()).hexdigest()


def _scale(config: Mapping[str, Any], module: str) -> float:
    """What the product of a module's matrices is scaled by."""
    alpha = float(_of_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha", 8)))
    rank = _of_pattern(config.get("rank_pattern"), module, config.get("r", 8))
    if not isinstance(rank, int) or rank < 1 or not math.isfinite(alpha):
        raise AdapterUnreadable(f"rank {rank!r} and alpha {alpha!r} give no scale")
    return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank


def _of_pattern(pattern: Any, module: str, default: Any) -> Any:
    """The value of the first pattern that the end of a module's name fits; ^: all of the name."""
    if not isinstance(pattern, dict | None):
        raise TypeError("a pattern is no object")
    for name, value in (pattern or {}).items():
        plain = name.replace(r"\.", ".").removesuffix("$")
        whole = plain.startswith("^")
        if module == plain.removeprefix("^") or (not whole and module.endswith(f".{plain}")):
            return value
    return default
