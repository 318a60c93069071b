"""Another revision of this project beside the working tree, and subprocesses that run either."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("twinplane", "control_plane", "worker_service", "bench")
_STUBS_SECONDS = 120.0


class TreeFailed(Exception):
    """A revision that can't be had or run. The text is for people."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A folder with all of this project's source. `commit`: what it was checked out from."""

    name: str
    commit: str
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """For a subprocess whose imports come from this tree before any installed one."""
        return {**os.environ, "PYTHONPATH": str(self.folder)}

    def run(self, *arguments: str, timeout: float) -> str:
        """What this interpreter prints when it runs in the tree.

        Raises TreeFailed when it fails or takes more than `timeout` seconds.
        """
        try:
            done = subprocess.run(
                [sys.executable, *arguments],
                cwd=self.folder, env=self.environment, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, check=True, timeout=timeout,
            )  # fmt: skip
        except subprocess.CalledProcessError as error:
            said = str(error.stderr)[-2000:]
            raise TreeFailed(f"{' '.join(arguments)} failed in {self.name}:\n{said}") from error
        except subprocess.TimeoutExpired as error:
            took = f"took more than {timeout:g} s in {self.name}"
            raise TreeFailed(f"{' '.join(arguments)} {took}") from error
        return done.stdout

    def check_imports(self) -> None:
        """Raises TreeFailed when a subprocess would import another tree's packages."""
        for package in _PACKAGES:
            code = f"import importlib.util as u; print(u.find_spec({package!r}).origin)"
            found = Path(self.run("-c", code, timeout=30).strip()).resolve()
            if not found.is_relative_to(self.folder.resolve()):
                raise TreeFailed(f"{package} of {self.name} would come from {found.parent}")


def git(*arguments: str) -> str:
    """What git prints, without the last line's end. Raises TreeFailed when it fails."""
    return _git(*arguments).decode().rstrip("\n")


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except (subprocess.CalledProcessError, FileNotFoundError) as error:
        said = getattr(error, "stderr", b"").decode().strip() or str(error)
        raise TreeFailed(f"git {arguments[0]}: {said}") from error


def last_release() -> str | None:
    """The newest tag that the working tree comes after; None without one."""
    try:
        return git("describe", "--tags", "--abbrev=0")
    except TreeFailed:
        return None


def working_tree() -> Tree:
    """The tree that this module lies in, as it is now."""
    return Tree("working tree", git("rev-parse", "--short", "HEAD"), ROOT)


def uncommitted() -> list[str]:
    """The files of the working tree that are not as in its commit, as `git status` prints them."""
    return git("status", "--porcelain").splitlines()


@contextlib.contextmanager
def checked_out(revision: str) -> Iterator[Tree]:
    """The revision in a temporary folder with stubs of its own, until the block is left.

    The folder is filled from `git archive`: a worktree would stay in .git's list when this process
    is killed. Raises TreeFailed.
    """
    # --end-of-options: a revision is no flag, whatever it begins with.
    commit = git("rev-parse", "--short", "--verify", "--end-of-options", revision + "^{commit}")
    packed = _git("archive", "--format=tar", commit)
    with tempfile.TemporaryDirectory(prefix="twinplane-against-") as folder:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(folder, filter="data")
        tree = Tree(revision, commit, Path(folder))
        tree.run("hatch_build.py", timeout=_STUBS_SECONDS)
        yield tree
