"""A model hub on this machine: the files of repositories, in the hub library's own layout."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import RevisionNotFoundError
from huggingface_hub.utils import _cache_manager, filter_repo_objects

Files = Mapping[str, str]


class FakeHub:
    """Serves `repositories`: the files of each revision (a branch or a tag) by repository.

    It takes the place of the library's download, which then finds in its cache, at `folder`, what
    a real download would have left there. `fetched` are the names of all files asked for.
    """

    def __init__(
        self,
        folder: Path,
        repositories: Mapping[str, Mapping[str, Files]],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self._repositories = repositories
        self._real = huggingface_hub.snapshot_download
        # Its scan reads a copy that was made when it was imported.
        for place in (constants, _cache_manager):
            monkeypatch.setattr(place, "HF_HUB_CACHE", str(folder))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", self._download)

    def _download(
        self,
        name: str,
        *,
        revision: str | None = None,
        local_files_only: bool = False,
        allow_patterns: list[str] | None = None,
        ignore_patterns: list[str] | None = None,
    ) -> str:
        if local_files_only:
            return self._real(name, revision=revision, local_files_only=True)
        revisions = self._repositories[name]
        commits = {commit_of(name, ref): ref for ref in revisions}
        ref = commits.get(revision or "main", revision or "main")
        if ref not in revisions:
            raise RevisionNotFoundError(ref, response=_NoResponse())
        repository = self.folder / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit_of(name, ref)
        for folder in (snapshot, repository / "refs", repository / "blobs"):
            folder.mkdir(parents=True, exist_ok=True)
        if revision not in commits:
            (repository / "refs" / ref).write_text(snapshot.name)
        files = revisions[ref]
        for file in filter_repo_objects(
            files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            self.fetched.append(file)
            blob = repository / "blobs" / hashlib.sha1(files[file].encode()).hexdigest()
            blob.write_text(files[file])
            if not (snapshot / file).is_symlink():
                (snapshot / file).symlink_to(Path("../../blobs") / blob.name)
        return str(snapshot)


class _NoResponse:
    """What the library's errors want to know of an HTTP answer."""

    def __init__(self) -> None:
        self.headers: dict[str, str] = {}
        self.request: Any = None


def commit_of(name: str, ref: str) -> str:
    """The commit that a revision is."""
    return hashlib.sha1(f"{name} {ref}".encode()).hexdigest()
