"""Where `twinplane up` keeps the sockets on which its workers listen."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from twinplane.settings.resolution import SettingsError

_LONGEST_NAME = "worker000.sock"
_LONGEST_PATH = 100
_SPECIAL_CHARACTERS = frozenset("%#?, ")


@contextmanager
def private_folder(environ: Mapping[str, str]) -> Iterator[str]:
    """A folder that only this user can enter (0700), for the worker's socket; removed at the end.

    It lies among the temporary files, or where else a short path can be written. Raises
    SettingsError.
    """
    tried = []
    for parent in _short_folders(environ):
        if len(os.fsencode(f"{parent}/twinplane-12345678/{_LONGEST_NAME}")) > _LONGEST_PATH:
            tried.append(f"{parent} (too long for a socket's path)")
            continue
        if set(parent) & _SPECIAL_CHARACTERS or not parent.isprintable():
            tried.append(f"{parent} (not an address for gRPC)")
            continue
        try:
            folder = tempfile.TemporaryDirectory(
                prefix="twinplane-", dir=parent, ignore_cleanup_errors=True
            )
        except OSError as error:
            tried.append(f"{parent} ({error.strerror})")
            continue
        with folder as path:
            yield path
        return
    raise SettingsError(
        f"no folder for the worker's socket, set TMPDIR to one: tried {', '.join(tried)}"
    )


def _short_folders(environ: Mapping[str, str]) -> Iterator[str]:
    """Where temporary files may go, the best place first."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        if given := environ.get(name):
            yield str(Path(given).absolute())
    yield "/tmp"
    if given := environ.get("XDG_RUNTIME_DIR"):
        yield given
    yield from ("/var/tmp", "/dev/shm")
