"""The package's extras: what each adds, and how to install one that is missing.

The base install is the client. A command that needs more says so in one line before it begins.
"""

from __future__ import annotations

import json
import shlex
import sys
from enum import Enum
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

_DISTRIBUTION = "twinplane"


class Extra(Enum):
    """An extra of pyproject.toml that commands need."""

    CONTROL = "control"
    WORKER = "worker"


# What cannot be done without, by the name that is imported. uvloop is not among it: without it
# streams are slower.
_MODULES = {
    Extra.CONTROL: (
        "gguf",
        "grpc_health",
        "grpc_reflection",
        "huggingface_hub",
        "jinja2",
        "numpy",
        "prometheus_client",
        "rich",
        "tokenizers",
    ),
    Extra.WORKER: ("safetensors", "torch"),
}


def missing_modules(extra: Extra) -> tuple[str, ...]:
    """The modules of an extra that are not installed. Nothing is imported to find out."""
    return tuple(module for module in _MODULES[extra] if not _is_there(module))


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def extra_of(module: str) -> Extra | None:
    """The extra that installs a module, or None."""
    top = module.partition(".")[0]
    return next((extra for extra, modules in _MODULES.items() if top in modules), None)


def install_command(extra: Extra) -> str:
    """A shell command that adds the extra to this installation, whatever it was installed from.

    An installer leaves beside the package where it came from, unless that was an index.
    """
    source = _source()
    name = f"{_DISTRIBUTION}[{extra.value}]"
    arguments = [name] if source is None else _requirement(source, extra)
    return shlex.join([sys.executable or "python3", "-m", "pip", "install", *arguments])


def _source() -> dict[str, Any] | None:
    """The installer's record of a direct URL (direct_url.json); None: from an index, or unknown."""
    try:
        text = distribution(_DISTRIBUTION).read_text("direct_url.json")
        record = json.loads(text) if text else None
    except (PackageNotFoundError, OSError, ValueError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("url"), str) else None


def _requirement(source: dict[str, Any], extra: Extra) -> list[str]:
    url: str = source["url"]
    if url.startswith("file:"):
        path = unquote(urlsplit(url).path)
        if Path(path).exists():
            is_editable = source.get("dir_info", {}).get("editable", False)
            return [*(["-e"] if is_editable else []), f"{path}[{extra.value}]"]
        return [f"{_DISTRIBUTION}[{extra.value}]"]
    if control := source.get("vcs_info"):
        url = f"{control['vcs']}+{url}@{control['commit_id']}"
    return [f"{_DISTRIBUTION}[{extra.value}] @ {url}"]


def how_to_get(extra: Extra) -> str:
    """What to do about a missing extra, in a sentence's tail."""
    command = install_command(extra)
    if extra is Extra.WORKER:
        return f"{command} (without an NVIDIA GPU, torch's CPU build first: README, Install)"
    return command
