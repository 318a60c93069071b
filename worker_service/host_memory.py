"""How much memory this machine has for a process: its own, or what its container may use.

Needs no torch.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from worker_service.control_groups import groups, read

_MEMINFO_LINE = re.compile(r"^(\w+):\s+(\d+) kB$", re.MULTILINE)
# Version 1 writes "no limit" as a number near 2^63.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`total_bytes` with swap, and the part of it that is `available_bytes` without swapping."""

    total_bytes: int
    available_bytes: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """What the machine has, within the limits of the process's control groups.

    `root` is where proc and sys are mounted; it is there for tests.
    """
    lines = dict(_MEMINFO_LINE.findall(read(root / "proc/meminfo")))
    if not {"MemTotal", "MemAvailable"} <= lines.keys():
        return _without_meminfo()
    total, available = int(lines["MemTotal"]) << 10, int(lines["MemAvailable"]) << 10
    for folder in groups(root, "memory"):
        limit = _first_number(folder, ("memory.max", "memory.limit_in_bytes"))
        if limit is None or limit >= _NO_LIMIT:
            continue
        total, available = min(total, limit), min(available, max(0, limit - _used(folder)))
    return HostMemory(total + (int(lines.get("SwapTotal", 0)) << 10), available)


def _without_meminfo() -> HostMemory:
    """On systems that are not Linux."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = os.sysconf("SC_PHYS_PAGES") * page
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return HostMemory(total, total)
    return HostMemory(total, os.sysconf("SC_AVPHYS_PAGES") * page)


def _used(group: Path) -> int:
    """Bytes that a group holds and that the system can't take back at once."""
    used = _first_number(group, ("memory.current", "memory.usage_in_bytes")) or 0
    idle_files = re.search(r"^(?:total_)?inactive_file (\d+)$", read(group / "memory.stat"), re.M)
    return used - (int(idle_files[1]) if idle_files else 0)


def _first_number(folder: Path, names: tuple[str, ...]) -> int | None:
    """None where no file is there, or it says "max"."""
    texts = (read(folder / name) for name in names)
    return next((int(text) for text in texts if text.isdecimal()), None)
