"""Which files a controller may name: those below the folder that the worker's operator allows."""

from __future__ import annotations

from pathlib import Path

from worker_service.domain.errors import UpdateInvalid


def allowed_path(root: Path | None, path: str, field_path: str = "update.disk.path") -> Path:
    """The path, links resolved; a relative one is meant from `root`. Raises UpdateInvalid where it
    is not below `root`, or there is none."""
    if root is None:
        raise UpdateInvalid(field_path, "this worker reads no files; start it with --weights-root")
    if not path or "\0" in path:
        raise UpdateInvalid(field_path, "is no path")
    try:
        allowed = root.resolve(strict=True)
        found = (allowed / path).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # a loop of links, or nothing there
        raise UpdateInvalid(field_path, "is not there, below --weights-root") from error
    if not found.is_relative_to(allowed):
        raise UpdateInvalid(field_path, "leads out of the folder that --weights-root allows")
    return found
