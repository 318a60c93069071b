"""Paths as people write them: `~` is a home folder, wherever a path can be given."""

from __future__ import annotations

import os
from pathlib import Path

_UNIX = "unix:"


class NoHomeFolder(ValueError):
    """A path begins with `~`, and nothing says where that home folder is."""


def expand(path: str) -> str:
    """`path` with a leading `~` or `~user` replaced. Raises NoHomeFolder."""
    if not path.startswith("~"):
        return path
    # A URL-like name keeps its double slashes, which pathlib would drop.
    expanded = os.path.expanduser(path)  # noqa: PTH111
    if expanded.startswith("~"):
        whose = path.split("/", 1)[0]
        raise NoHomeFolder(f"{whose} has no home folder here: set HOME, or give the whole path")
    return expanded


def expand_address(address: str) -> str:
    """An address, with `~` replaced in `unix:~/PATH`, as gRPC takes it. Raises NoHomeFolder."""
    if not address.startswith(_UNIX):
        return address
    return _UNIX + utf8_path(expand(address.removeprefix(_UNIX)))


def utf8_path(path: Path | str) -> str:
    """The path for native code that takes UTF-8, whatever the locale's encoding is."""
    try:
        return os.fsencode(path).decode("utf-8", errors="surrogateescape")
    except UnicodeEncodeError:  # text already, which the locale's encoding lacks
        return str(path)


def as_text(name: str) -> str:
    """A name that was given as a path or an argument, as text: what is no UTF-8 becomes "?"."""
    try:
        return os.fsencode(name).decode("utf-8", errors="replace")
    except UnicodeEncodeError:  # text already, which the locale's encoding lacks
        return name


def home_folder() -> Path | None:
    """This user's home folder; None where neither HOME nor the user database names one."""
    try:
        return Path(expand("~"))
    except NoHomeFolder:
        return None
