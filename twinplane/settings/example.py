"""Writes the example of a settings file: `python -m twinplane.settings.example`.

Every setting is in it, as a comment with what it means and its default.
"""

from __future__ import annotations

import json
import sys
import textwrap
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Any, get_type_hints

from twinplane.settings.control import ControlConfig
from twinplane.settings.worker import WorkerConfig

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_HEAD = """\
# An example of a settings file. It has every setting, as a comment that tells the default: take
# away the # before a key to set it. --config or TWINPLANE_CONFIG names the file.
#
# A flag wins over an environment variable (TWINPLANE_MAX_NUM_SEQS), and a variable over this file.
# A key before the first table is for both planes. This file is the output of
# `python -m twinplane.settings.example`.
"""
_COLUMNS = 100
# Of texts that have no default.
_EXAMPLES = {
    "served_model_name": "assistant",
    "uds": "/run/twinplane/plane.sock",
    "worker_id": "gpu-0",
    "worker": "127.0.0.1:50061",
    "workers_file": "/etc/twinplane/workers",
    "workers_dns": "workers.default.svc:50061",
    "rendezvous_host": "gpu-0.example",
    "weights_root": "/srv/weights",
    "lora_modules": "french=/srv/adapters/french",
    "state_dir": "/var/lib/twinplane",
}


def example() -> str:
    """The file's content."""
    return "\n".join(
        (_HEAD, *_table("control", ControlConfig()), *_table("worker", WorkerConfig()))
    )


def _table(name: str, defaults: DataclassInstance) -> list[str]:
    lines, group = [f"[{name}]", ""], None
    hints = get_type_hints(type(defaults))
    for setting in fields(defaults):
        if setting.metadata["group"] != group:
            group = setting.metadata["group"]
            lines += [f"## {group}", ""]
        lines += _lines(setting, getattr(defaults, setting.name), hints[setting.name])
        lines.append("")
    return lines


def _lines(setting: Field[Any], default: object, annotation: Any) -> list[str]:
    meaning = setting.metadata["help"]
    if choices := setting.metadata["choices"]:
        meaning += f"; one of: {', '.join(choices)}"
    if setting.name.endswith("_bytes"):
        meaning += '; or a size such as "2GiB"'
    value = json.dumps(_shown(setting.name, default, annotation), ensure_ascii=False)
    wrapped = textwrap.wrap(meaning, _COLUMNS, initial_indent="# ", subsequent_indent="# ")
    return [*wrapped, f"#{setting.name} = {value}"]


def _shown(name: str, default: object, annotation: Any) -> object:
    """A number that has no default is "none", which means just that."""
    if default is None:
        return _EXAMPLES.get(name, "…") if annotation == str | None else "none"
    return default


if __name__ == "__main__":
    sys.stdout.write(example())
