"""Walks docs/first-day.md as a newcomer does: `make firstday`.

    python -m tests.first_day [--here]

Clones the last commit into a temporary folder, with an empty home, and installs there: several
minutes, and a download of the model. --here takes this environment and its model instead. Says
which task failed, and why; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.first_day.page import read_page
from tests.first_day.terminals import NotAsWritten
from tests.first_day.walk import Reader, path_with, walk_all
from tests.support.planes import ROOT

FRESH_SECONDS = 1200.0
HERE_SECONDS = 180.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.first_day")
    parser.add_argument("--here", action="store_true", help="use the environment that is there")
    here: bool = parser.parse_args().here
    with tempfile.TemporaryDirectory(prefix="first-day-") as folder:
        reader = reader_here(Path(folder)) if here else newcomer(Path(folder))
        try:
            walk_all(reader, read_page(reader.clone / "docs" / "first-day.md"))
        except NotAsWritten as error:
            print(f"docs/first-day.md is not true: {error}", file=sys.stderr)
            return 1
    print("docs/first-day.md is true")
    return 0


def reader_here(folder: Path) -> Reader:
    """A reader who has this environment and its model. `folder` becomes the home."""
    environment = without_settings()
    cache = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    environment.setdefault("TWINPLANE_HOME", str(Path(cache) / "twinplane"))
    environment["VENV"] = sys.prefix
    environment["PYTHON"] = sys.executable
    environment["PATH"] = path_with(Path(sys.prefix) / "bin", environment)
    return Reader(ROOT, folder, environment, installs=False, seconds=HERE_SECONDS)


def newcomer(folder: Path) -> Reader:
    """A reader with a clone of the last commit and nothing else, but pip's own configuration."""
    clone, home, origin = folder / "twinplane", folder / "home", folder / "origin.git"
    home.mkdir()
    git("init", "--quiet", "--bare", "--initial-branch=main", str(origin))
    git("-C", str(ROOT), "push", "--quiet", str(origin), "HEAD:refs/heads/main")
    git("clone", "--quiet", str(origin), str(clone))
    environment = without_settings()
    for name in ("TWINPLANE_HOME", "XDG_CACHE_HOME", "VENV", "VIRTUAL_ENV"):
        environment.pop(name, None)
    environment.setdefault("XDG_CONFIG_HOME", str(Path.home() / ".config"))
    environment["PATH"] = path_with(clone / ".venv" / "bin", environment)
    return Reader(clone, home, environment, installs=True, seconds=FRESH_SECONDS)


def without_settings() -> dict[str, str]:
    """This environment without settings of Twinplane's but where the models are."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TWINPLANE_") or name == "TWINPLANE_HOME"
    }


def git(*arguments: str) -> None:
    """Runs git. Raises CalledProcessError."""
    subprocess.run(["git", *arguments], check=True)


if __name__ == "__main__":
    sys.exit(main())
