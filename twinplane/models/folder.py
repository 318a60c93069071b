"""A Hugging Face model folder's files, without their weights: what is there, and whether it can be
read. No torch.

Whatever is wrong is said as one line that names the file, the reason and what to do about it.
"""

from __future__ import annotations

import json
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinplane.models.errors import ModelInvalid

CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

_AGAIN = "download the model again"
_REPLACE = "remove it and download the model again"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_NAMES_TOLD = 3
# Their presence says that the weights are not what config.json alone describes.
_ADAPTER_NAME = "adapter_config.json"
_QUANTIZATION_NAMES = (
    "hf_quant_config.json",
    "quantize_config.json",
    "quant_config.json",
    "quantization_config.json",
)
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.npz", "*.onnx")


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A folder whose files can be read.

    `weight_files` are in the order of their names. `weight_map` names the file of each tensor where
    an index says it, else it is empty.
    """

    config: Mapping[str, Any]
    weight_files: tuple[Path, ...]
    weight_map: Mapping[str, str]


def open_folder(folder: Path) -> ModelFolder:
    """Reads config.json and the index, and looks at the weight files. Raises ModelInvalid."""
    config = read_config(folder)
    for name in _QUANTIZATION_NAMES:
        if is_there(folder / name):
            raise ModelInvalid(
                f"{folder / name} says that the weights are quantized; only weights that are not "
                "quantized are read"
            )
    weight_map = _weight_map(folder)
    names = sorted(set(weight_map.values())) or [SINGLE_NAME]
    for name in names:
        check_readable(folder / name)
    return ModelFolder(config, tuple(folder / name for name in names), weight_map)


def read_config(folder: Path) -> Mapping[str, Any]:
    """The content of config.json in a folder that holds a whole model. Raises ModelInvalid."""
    if not is_folder(folder):
        raise ModelInvalid(f"{folder} is not a folder; give the folder that holds {CONFIG_NAME}")
    if is_there(folder / _ADAPTER_NAME):
        raise ModelInvalid(
            f"{folder} holds an adapter ({_ADAPTER_NAME}), which is not read: merge the adapter "
            "into its base model, or take the file away to serve the model without it"
        )
    path = folder / CONFIG_NAME
    if not is_there(path):
        raise ModelInvalid(f"{path} is missing: {_instead_of_config(folder)}")
    return read_json(path)


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file. Raises ModelInvalid, also for a key with two different values."""
    check_readable(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_object_of(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelInvalid(f"{path} cannot be read as JSON ({error}); {_REPLACE}") from error
    if not isinstance(value, dict):
        raise ModelInvalid(f"{path} must hold a JSON object")
    return value


def read_weight_map(index: Path) -> Mapping[str, str]:
    """The file of each tensor, by the index. Raises ModelInvalid."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelInvalid(f"{index} has no weight_map; {_REPLACE}")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ModelInvalid(
                f"{index} says that {tensor} is in {name!r}, which is not a file of this folder"
            )
    return weight_map


def missing_file(folder: Path) -> str | None:
    """The first file that a plane would miss in `folder`, or None when all are there."""
    if not (folder / CONFIG_NAME).is_file():
        return CONFIG_NAME
    index = folder / INDEX_NAME
    if not index.is_file():
        return None if (folder / SINGLE_NAME).is_file() else SINGLE_NAME
    try:
        shards = set(read_weight_map(index).values())
    except ModelInvalid:
        return INDEX_NAME  # what is there in its place is of no use
    return next((shard for shard in sorted(shards) if not (folder / shard).is_file()), None)


def missing_text_file(folder: Path) -> str | None:
    """The first file that a control plane would miss in `folder`, or None: it needs no weights."""
    names = (CONFIG_NAME, TOKENIZER_NAME)
    return next((name for name in names if not (folder / name).is_file()), None)


def check_readable(path: Path) -> None:
    """Raises ModelInvalid unless `path` is a file with content that this user can read."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ModelInvalid(f"{path} is a folder, and must be a file; {_REPLACE}")
        if not stat.S_ISREG(mode):
            raise ModelInvalid(f"{path} is not a regular file")
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
    except FileNotFoundError as error:
        if path.is_symlink():
            raise ModelInvalid(
                f"{path} is a link to {path.readlink()}, which is missing; {_REPLACE}"
            ) from error
        raise ModelInvalid(f"{path} is missing; {_AGAIN}") from error
    except OSError as error:
        raise ModelInvalid(unreadable(path, error)) from error
    if not start:
        raise ModelInvalid(f"{path} is empty; {_REPLACE}")
    if start == _LFS_POINTER:
        raise ModelInvalid(
            f"{path} is only a pointer of Git LFS: run `git lfs pull` in its folder, or {_AGAIN}"
        )


def unreadable(path: Path, error: OSError) -> str:
    """Why the system refuses to read `path`, as one line for people."""
    if isinstance(error, PermissionError):
        return f"{path} cannot be read: this user has no permission; change its owner or its mode"
    return f"{path} cannot be read ({error.strerror or error})"


def is_folder(path: Path) -> bool:
    """Whether it is one. Raises ModelInvalid where that can't be seen."""
    try:
        return path.is_dir()
    except OSError as error:
        raise ModelInvalid(unreadable(path, error)) from error


def is_file(path: Path) -> bool:
    """Whether it is one. Raises ModelInvalid where that can't be seen."""
    try:
        return path.is_file()
    except OSError as error:
        raise ModelInvalid(unreadable(path, error)) from error


def is_there(path: Path) -> bool:
    """Whether there is an entry of that name, be it a link that leads nowhere.

    Raises ModelInvalid where that can't be seen.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # or it can be no path at all
        return False
    except OSError as error:
        raise ModelInvalid(unreadable(path, error)) from error
    return True


def _object_of(path: Path) -> Any:
    """A hook for `json` that makes an object of its pairs."""

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values and repr(values[key]) != repr(value):
                raise ModelInvalid(
                    f"{path} says {key} twice, as {reprlib.repr(values[key])} and as "
                    f"{reprlib.repr(value)}; remove one"
                )
            values[key] = value
        return values

    return make


def _weight_map(folder: Path) -> Mapping[str, str]:
    """The file of each tensor by the index; empty where one file holds all of them."""
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if not is_there(index):
        if not is_there(single):
            instead = _instead_of_weights(folder)
            raise ModelInvalid(f"{folder} has neither {SINGLE_NAME} nor {INDEX_NAME}: {instead}")
        return {}
    weight_map = read_weight_map(index)
    if is_there(single) and SINGLE_NAME not in weight_map.values():
        raise ModelInvalid(
            f"{folder} holds the weights twice, in {SINGLE_NAME} and in the files that "
            f"{INDEX_NAME} names; remove one of the two"
        )
    return weight_map


def _instead_of_config(folder: Path) -> str:
    if files := _found(folder, ("*.gguf",)):
        return f"the folder holds {_told(files)}; give a .gguf file itself"
    return "is this a Hugging Face model folder?"


def _instead_of_weights(folder: Path) -> str:
    """What the folder holds in the weights' place, and what to do about it."""
    if files := _found(folder, ("*.safetensors",)):
        return f"it holds {_told(files)}, which belong to no index; {_AGAIN}"
    if files := _found(folder, ("*.gguf",)):
        return f"it holds {_told(files)}; give a .gguf file itself"
    if files := _found(folder, _OTHER_WEIGHTS):
        return (
            f"it holds {_told(files)}, and only safetensors weights are read; load them with "
            "transformers and save them again with save_pretrained"
        )
    return f"only safetensors weights are read; {_AGAIN}"


def _found(folder: Path, patterns: tuple[str, ...]) -> list[str]:
    return sorted(path.name for pattern in patterns for path in folder.glob(pattern))


def _told(names: list[str]) -> str:
    rest = len(names) - _NAMES_TOLD
    return ", ".join(names[:_NAMES_TOLD]) + (f" and {rest} more" if rest > 0 else "")
