"""Models of a Hugging Face hub, kept in the hub library's own cache."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from twinplane.models.errors import ModelNotFound, PullFailed
from twinplane.models.folder import missing_file
from twinplane.paths import home_folder

# Pickled weights and code are never fetched.
_FILES = ["*.json", "*.safetensors", "tokenizer*", "*.jinja"]
_NEVER = ["*.bin", "*.pt", "*.pth", "*.py", "*.pkl"]
_NO_HOME = "this user has no home folder for the hub's cache: set HF_HOME to a folder"
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `org/name`."""
    return _ID.fullmatch(name) is not None


def has_hub_cache(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the hub library has a folder to keep models in."""
    named = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    return home_folder() is not None or any(environ.get(name) for name in named)


def find_snapshot(name: str) -> Path:
    """The complete local snapshot of a hub model. Raises ModelNotFound."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    how = f"run: twinplane model pull {name}"
    if not has_hub_cache():
        raise ModelNotFound(f"model {name} can't be looked for: {_NO_HOME}")
    try:
        folder = Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(f"model {name} is not on this machine; {how}") from error
    except OSError as error:
        raise ModelNotFound(
            f"model {name} can't be read: {error.strerror} ({error.filename}); "
            "HF_HOME names another place"
        ) from error
    if missing := missing_file(folder):
        raise ModelNotFound(f"model {name} is here without {missing}; {how}")
    return folder


def pull_snapshot(name: str) -> Path:
    """Downloads the files of a hub model that serving needs. Raises PullFailed.

    The hub library gives files their names when they are whole, and goes on with the rest of one
    that an interrupted pull left.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    if not has_hub_cache():
        raise PullFailed(f"{name} can't be kept: {_NO_HOME}")
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_NEVER))
    except GatedRepoError as error:
        raise PullFailed(f"{name} is gated: accept its terms on the hub, then log in") from error
    except RepositoryNotFoundError as error:
        raise PullFailed(f"the hub has no model {name} (or it needs a login)") from error
    except OSError as error:
        if error.filename is not None:
            raise PullFailed(
                f"{name} can't be kept: {error.strerror} ({error.filename}); "
                "HF_HOME names another place"
            ) from error
        raise PullFailed(
            f"the model hub can't be reached for {name} ({type(error).__name__}); "
            "check the network, or give --model a folder or a .gguf file"
        ) from error
    if missing := missing_file(folder):
        raise PullFailed(f"{name} has no {missing}: only safetensors models can be served")
    return folder
