"""Settings as frozen dataclasses, resolved once: flag > environment > TOML file > default.

A setting is a dataclass field made by `option`; its name in lower_snake_case gives the flag
(--max-num-seqs), the environment variable (TWINPLANE_MAX_NUM_SEQS) and the TOML key.
"""

from __future__ import annotations

from dataclasses import field
from typing import Any


def option(default: Any, help: str, *, group: str, choices: tuple[str, ...] = ()) -> Any:  # noqa: A002
    """A setting: its default, one line of help, the group it is listed under, allowed values."""
    return field(default=default, metadata={"help": help, "group": group, "choices": choices})
