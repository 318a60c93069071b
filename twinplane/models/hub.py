"""Models of a Hugging Face hub, kept in the hub library's own cache."""

from __future__ import annotations

import re
from pathlib import Path

from twinplane.models.errors import ModelNotFound, PullFailed
from twinplane.models.folder import missing_file

# Pickled weights and code are never fetched.
_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
_NEVER = ["*.bin", "*.pt", "*.pth", "*.py", "*.pkl"]
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `org/name`."""
    return _ID.fullmatch(name) is not None


def find_snapshot(name: str) -> Path:
    """The complete local snapshot of a hub model. Raises ModelNotFound."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    how = f"run: twinplane model pull {name}"
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(f"model {name} is not on this machine; {how}") from error
    if missing := missing_file(folder):
        raise ModelNotFound(f"model {name} is here without {missing}; {how}")
    return folder


def pull_snapshot(name: str) -> Path:
    """Downloads the files of a hub model that serving needs. Raises PullFailed."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_NEVER))
    except GatedRepoError as error:
        raise PullFailed(f"{name} is gated: accept its terms on the hub, then log in") from error
    except RepositoryNotFoundError as error:
        raise PullFailed(f"the hub has no model {name} (or it needs a login)") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError) as error:
        raise PullFailed(
            f"the model hub can't be reached for {name} ({type(error).__name__}); "
            "check the network, or give --model a folder or a .gguf file"
        ) from error
    if missing := missing_file(folder):
        raise PullFailed(f"{name} has no {missing}: only safetensors models can be served")
    return folder
