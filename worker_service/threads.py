"""How many threads a worker's device gets. Resolved once, at startup; needs no torch.

Threads beyond the cores that the process may use, or beyond the CPU quota of its container, only
wait for one another.
"""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from worker_service.control_groups import groups, read


@dataclass(frozen=True, slots=True)
class ThreadCount:
    """A number of threads, at least 1, and a text that tells people where it comes from."""

    count: int
    source: str


def resolve_threads(
    setting: int | None,
    *,
    sharers: int = 1,
    root: Path = Path("/"),
    processors: Collection[int] | None = None,
) -> ThreadCount:
    """The setting or, without one, a thread for each core within the container's CPU quota: of
    `sharers` workers on the same cores, each has its share.

    `root` is where proc and sys are mounted. `processors` are the numbers of the processors that
    this process may use, by default its affinity mask. Both arguments are there for tests.
    """
    if setting is not None:
        return ThreadCount(setting, "the setting `threads`")
    cores = _core_count(root, os.sched_getaffinity(0) if processors is None else processors)
    quota = _cpu_quota(root)
    count, source = cores, "the cores that this process may use"
    if quota is not None and quota < cores:
        count, source = math.ceil(quota), f"a CPU quota of {quota:g} on {cores} cores"
    if sharers > 1:
        count, source = count // sharers, f"{source}, shared by {sharers} workers"
    return ThreadCount(max(1, count), source)


def library_thread_variables(threads: ThreadCount) -> dict[str, str]:
    """Variables that keep the thread pools of numpy's and torch's libraries to that number.

    The libraries read them when they are loaded, and would otherwise start a thread for each
    processor of the machine, whatever the container may use.
    """
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict.fromkeys(names, str(threads.count))


def _core_count(root: Path, processors: Collection[int]) -> int:
    """Cores behind the processors: those that share a core also share its arithmetic units."""
    folder = root / "sys/devices/system/cpu"
    siblings = {
        read(folder / f"cpu{number}/topology/thread_siblings_list") or str(number)
        for number in processors
    }
    return max(1, len(siblings))


def _cpu_quota(root: Path) -> float | None:
    """CPUs' worth of time that the control groups leave this process; None: no limit."""
    quotas = [quota for folder in groups(root, "cpu") if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _quota_of(group: Path) -> float | None:
    """The quota of one group, of version 2 (cpu.max) or version 1; None where it sets none."""
    quota, _, period = read(group / "cpu.max").partition(" ")
    if not quota:
        quota = read(group / "cpu.cfs_quota_us")
        period = read(group / "cpu.cfs_period_us")
    try:
        cpus = float(quota) / float(period)
        return cpus if 0 < cpus < math.inf else None
    except (ValueError, ZeroDivisionError):  # "max", no such file, or an unknown format
        return None
