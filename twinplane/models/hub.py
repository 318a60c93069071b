"""Models of a Hugging Face hub, kept in the hub library's own cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from twinplane.models.errors import CacheUnusable, ModelNotFound, PullFailed
from twinplane.models.folder import CONFIG_NAME, INDEX_NAME, missing_file, missing_text_file
from twinplane.paths import home_folder

# Pickled weights and code are never fetched.
_TEXT_FILES = ["*.json", "tokenizer*", "*.jinja"]
_FILES = [*_TEXT_FILES, "*.safetensors"]
_NEVER = ["*.bin", "*.pt", "*.pth", "*.py", "*.pkl"]
_NO_HOME = "this user has no home folder for the hub's cache: set HF_HOME to a folder"
CheckConfig = Callable[[Path], None]
_ID = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([\w.-]+(?:/[\w.-]+)*))?")
_MAIN = "main"


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form `org/name` or `org/name@revision`: a branch, tag or commit."""
    return _ID.fullmatch(name) is not None


def has_revision(name: str) -> bool:
    """Whether it is a hub id that names a revision."""
    match = _ID.fullmatch(name)
    return match is not None and match[2] is not None


def how_to_pull(name: str, weights: bool) -> str:
    """What to type to get the model."""
    tail = (
        "" if weights else " (--tokenizer-only leaves out the weights, which only a worker needs)"
    )
    return f"run: twinplane model pull {name}{tail}"


def has_hub_cache(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the hub library has a folder to keep models in."""
    named = ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME")
    return home_folder() is not None or any(environ.get(name) for name in named)


def find_snapshot(name: str, *, weights: bool = True) -> Path:
    """The local snapshot of a hub model, complete but for the weights where they are not asked for.

    Raises ModelNotFound.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    how = how_to_pull(name, weights)
    if not has_hub_cache():
        raise ModelNotFound(f"model {name} can't be looked for: {_NO_HOME}")
    try:
        repository, revision = _parts(name)
        folder = Path(snapshot_download(repository, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise ModelNotFound(f"model {name} is not on this machine; {how}") from error
    except OSError as error:
        raise ModelNotFound(
            f"model {name} can't be read: {error.strerror} ({error.filename}); "
            "HF_HOME names another place"
        ) from error
    if missing := missing_file(folder) if weights else missing_text_file(folder):
        raise ModelNotFound(f"model {name} is here without {missing}; {how}")
    return folder


def no_check(folder: Path) -> None:
    """Lets any model be fetched."""


def pull_snapshot(name: str, check: CheckConfig = no_check, *, weights: bool = True) -> Path:
    """Downloads the files of a hub model that serving needs, `weights` or not. Raises PullFailed.

    config.json comes first: `check` gets the folder that holds it, and what it raises leaves the
    weights where they are. The hub library gives files their names when they are whole, and goes on
    with the rest of one that an interrupted pull left.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    if not has_hub_cache():
        raise PullFailed(f"{name} can't be kept: {_NO_HOME}")
    try:
        repository, revision = _parts(name)
        folder = Path(
            snapshot_download(repository, revision=revision, allow_patterns=[CONFIG_NAME])
        )
        if (folder / CONFIG_NAME).is_file():
            check(folder)
        # The very same revision, named by the snapshot's folder.
        folder = Path(
            snapshot_download(
                repository,
                revision=folder.name,
                allow_patterns=_FILES if weights else _TEXT_FILES,
                ignore_patterns=_NEVER if weights else [*_NEVER, INDEX_NAME],
            )
        )
    except GatedRepoError as error:
        raise PullFailed(f"{name} is gated: accept its terms on the hub, then log in") from error
    except RevisionNotFoundError as error:
        raise PullFailed(
            f"the hub's model {name.partition('@')[0]} has no such revision"
        ) from error
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
    if not weights:
        if missing := missing_text_file(folder):
            raise PullFailed(f"{name} has no {missing}, without which there is no tokenizer")
    elif missing := missing_file(folder):
        raise PullFailed(f"{name} has no {missing}: only safetensors models can be served")
    return folder


def snapshots() -> list[tuple[str, Path]]:
    """Every snapshot of a model in the hub library's cache, by the id that leads to it."""
    if not has_hub_cache():
        return []
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir().repos
    except CacheNotFound:
        return []
    return sorted(
        (f"{repository.repo_id}{_suffix(revision.refs, revision.commit_hash)}", folder)
        for repository in repositories
        if repository.repo_type == "model"
        for revision in repository.revisions
        for folder in (revision.snapshot_path,)
    )


def remove_snapshot(folder: Path) -> None:
    """Removes one snapshot, and what no other snapshot shares. Raises CacheUnusable."""
    from huggingface_hub import scan_cache_dir

    try:
        scan_cache_dir().delete_revisions(folder.name).execute()
    except OSError as error:
        raise CacheUnusable(
            f"can't remove {folder}: {error.strerror or error} ({error.filename or folder})"
        ) from error


def _suffix(refs: Collection[str], commit: str) -> str:
    """What follows a repository's name in the id of a snapshot."""
    return "" if _MAIN in refs else f"@{min(refs, default=commit)}"


def _parts(name: str) -> tuple[str, str | None]:
    """The repository and the revision of a hub id."""
    match = _ID.fullmatch(name)
    assert match is not None, name
    return match[1], match[2]
