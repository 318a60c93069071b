"""Which paths an update may name: those below the folder that the operator allows. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from twinplane.models.folder import CONFIG_NAME, INDEX_NAME
from worker_service.domain.errors import UpdateInvalid

FIELD = "update.disk.path"
ADAPTER_CONFIG_NAME = "adapter_config.json"


def allowed_path(path: str, root: Path | None) -> Path:
    """The real path of what a request names. Raises UpdateInvalid where it is not below the root,
    links resolved, or not there."""
    if root is None:
        raise UpdateInvalid(
            FIELD, "this worker reads nothing from disk; start it with --weights-root FOLDER"
        )
    if not path or "\0" in path:
        raise UpdateInvalid(FIELD, "must be a path")
    try:
        allowed = root.resolve(strict=True)
        found = (allowed / path).resolve(strict=True)
    except (OSError, RuntimeError) as error:  # not there, or links that lead round
        reason = error.strerror if isinstance(error, OSError) else "its links lead round"
        raise UpdateInvalid(FIELD, f"{path!r} can't be read: {reason}") from error
    _require_below(found, allowed, path)
    if found.is_dir():
        for file in _files(found):
            try:
                _require_below(file.resolve(strict=True), allowed, f"{path}/{file.name}")
            except (OSError, RuntimeError) as error:
                raise UpdateInvalid(FIELD, f"{file.name} can't be read") from error
    return found


def _files(folder: Path) -> Iterator[Path]:
    """What of a model's or an adapter's folder is read."""
    for name in (CONFIG_NAME, INDEX_NAME, ADAPTER_CONFIG_NAME):
        if (folder / name).is_symlink() or (folder / name).exists():
            yield folder / name
    yield from sorted(folder.glob("*.safetensors"))


def _require_below(found: Path, root: Path, given: str) -> None:
    if not found.is_relative_to(root):
        raise UpdateInvalid(
            FIELD, f"{given!r} is not below the folder that --weights-root of this worker allows"
        )
