"""Where the control groups of this process keep their limits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's control groups and of all above them: each may set a limit.

    `root` is where proc and sys are mounted; `controller` is one of version 1: cpu, memory. Inside
    a container the listed path may be the host's, where only the mount's top is visible.
    """
    mount = root / "sys/fs/cgroup"
    for line in read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        names = controllers.split(",")
        if controllers and controller not in names:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for top in (mount / controllers, mount / controller) if controllers else (mount,):
            yield from (top / above for above in (group, *group.parents) if ".." not in above.parts)


def read(path: Path) -> str:
    """The file's text without white space around it; empty where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):  # not there, not ours to read, or no path at all
        return ""
