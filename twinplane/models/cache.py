"""The cache on disk: where it is, and the one way a model's folder gets into it.

    <root>/models/<name>/     complete models, ready to load
    <root>/staging/<name>/    a folder being made or removed, by the holder of the lock
    <root>/locks/<name>.lock  held while a model is made

A folder is made in `staging` and then renamed into `models`, and removed the other way. Every
folder under `models` therefore has all that was made, whatever interrupts the work. The next run
clears the staging folder that an interrupted run leaves.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from twinplane.models.errors import CacheUnusable
from twinplane.paths import NoHomeFolder, expand, home_folder


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """$TWINPLANE_HOME, else $XDG_CACHE_HOME/twinplane, else ~/.cache/twinplane.

    Models and compiled kernels have their folders in it. Raises CacheUnusable where the user has no
    home folder and neither variable is set.
    """
    try:
        if home := environ.get("TWINPLANE_HOME"):
            return Path(expand(home))
        xdg = expand(environ.get("XDG_CACHE_HOME", ""))
    except NoHomeFolder as error:
        raise CacheUnusable(f"the cache's folder is not known: {error}") from error
    # The XDG specification: a relative path is to be ignored.
    if xdg.startswith("/"):
        return Path(xdg) / "twinplane"
    user_home = home_folder()
    if user_home is None:
        raise CacheUnusable(
            f"user {os.getuid()} has no home folder for the cache: "
            "set TWINPLANE_HOME to a folder that it can write to"
        )
    return user_home / ".cache" / "twinplane"


class ModelCache:
    """Complete model folders by name. Safe for several processes at once.

    `root` may be a function, which is called when the cache is first needed: a model that is a
    folder is served without a cache, whether or not there can be one.
    """

    def __init__(self, root: Path | Callable[[], Path]) -> None:
        self._root = root

    @property
    def root(self) -> Path:
        """The folder of the cache. Raises CacheUnusable where none can be named."""
        if not isinstance(self._root, Path):
            self._root = self._root()
        return self._root

    @property
    def models(self) -> Path:
        """The folder that holds complete models."""
        return self.root / "models"

    def find(self, name: str) -> Path | None:
        """The complete folder called `name`, or None. Raises CacheUnusable."""
        folder = self.models / name
        with self._readable():
            return folder if (folder / "config.json").is_file() else None

    def folders(self) -> list[Path]:
        """Every complete folder, by name. Raises CacheUnusable."""
        with self._readable():
            if not self.models.is_dir():
                return []
            return [path for path in sorted(self.models.iterdir()) if self.find(path.name)]

    def get_or_make(
        self,
        name: str,
        make: Callable[[Path], None],
        suffices: Callable[[Path], bool] = lambda folder: True,
    ) -> Path:
        """The folder called `name`. If it isn't there, `make(empty_folder)` makes it.

        One that does not suffice is there until the new one takes its place. When `make` raises,
        nothing is left behind. A second caller waits for the first and gets its folder. Raises
        CacheUnusable.
        """
        with self._writable(f"make {name}"):
            # Without the lock first: a cache that is read-only serves what is in it.
            if (found := self.find(name)) and suffices(found):
                return found
            with self._locked(name):
                if (found := self.find(name)) and suffices(found):
                    return found
                staging = self._cleared(name)
                staging.mkdir(parents=True)
                try:
                    make(staging)
                    final = self.models / name
                    final.parent.mkdir(parents=True, exist_ok=True)
                    if final.exists():
                        final.rename(self._cleared(f"{name}.old"))
                    staging.rename(final)
                finally:
                    self._cleared(name)
                    self._cleared(f"{name}.old")
                return final

    def remove(self, name: str) -> bool:
        """Removes the folder called `name`, whole or not; False if there is none.

        What has its files open keeps them. Raises CacheUnusable.
        """
        final = self.models / name
        with self._writable(f"remove {name}"):
            if not final.is_dir():
                return False
            with self._locked(name):
                staging = self._cleared(name)
                staging.parent.mkdir(parents=True, exist_ok=True)
                if final.is_dir():
                    final.rename(staging)
                shutil.rmtree(staging, ignore_errors=True)
            return True

    def _cleared(self, name: str) -> Path:
        """The path of a staging folder, at which there is nothing."""
        staging = self.root / "staging" / name
        shutil.rmtree(staging, ignore_errors=True)
        return staging

    @contextmanager
    def _writable(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self.root
            raise CacheUnusable(
                f"can't {doing} in {self.root}: {error.strerror} ({where}); "
                "TWINPLANE_HOME names another place"
            ) from error

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            where = error.filename or self.root
            raise CacheUnusable(
                f"can't read the cache {self.root}: {error.strerror} ({where}); "
                "TWINPLANE_HOME names another place"
            ) from error

    @contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        path = self.root / "locks" / f"{name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process ends
            yield
