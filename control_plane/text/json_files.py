"""Reads the JSON files of a model's folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from control_plane.text.errors import ModelFilesInvalid


def read_object(path: Path) -> dict[str, Any]:
    """The file's object; an empty one when there is no such file. Raises ModelFilesInvalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ModelFilesInvalid(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFilesInvalid(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesInvalid(f"{path} is not a JSON object")
    return value
