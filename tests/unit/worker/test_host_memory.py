"""How much memory there is: the machine's, or what the container may use of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from worker_service.host_memory import HostMemory, host_memory

KB, MB = 1 << 10, 1 << 20
MEMINFO = "MemTotal:       1000000 kB\nMemFree:         100000 kB\nMemAvailable:   600000 kB\n"


def machine(root: Path, meminfo: str = MEMINFO) -> Path:
    """A root with /proc/meminfo."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(meminfo)
    return root


def write(root: Path, **texts: str) -> None:
    for path, text in texts.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)


def test_a_machine_without_limits(tmp_path: Path) -> None:
    assert host_memory(machine(tmp_path)) == HostMemory(1_000_000 * KB, 600_000 * KB)


def test_swap_is_memory_that_is_not_free(tmp_path: Path) -> None:
    root = machine(tmp_path, MEMINFO + "SwapTotal:      500000 kB\n")
    assert host_memory(root) == HostMemory(1_500_000 * KB, 600_000 * KB)


VERSION_2 = {"proc/self/cgroup": "0::/pod/app\n"}
VERSION_1 = {"proc/self/cgroup": "5:cpu,cpuacct:/other\n9:memory:/pod/app\n"}
TWO, ONE = "sys/fs/cgroup/pod/", "sys/fs/cgroup/memory/pod/"


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        ({}, 1_000_000 * KB, 600_000 * KB),
        ({f"{TWO}app/memory.max": "max\n"}, 1_000_000 * KB, 600_000 * KB),
        ({f"{TWO}app/memory.max": "nonsense"}, 1_000_000 * KB, 600_000 * KB),
        ({f"{TWO}app/memory.max": str(1 << 62)}, 1_000_000 * KB, 600_000 * KB),
        ({f"{TWO}app/memory.max": str(200 * MB)}, 200 * MB, 200 * MB),
        ({f"{TWO}memory.max": str(200 * MB)}, 200 * MB, 200 * MB),
        (
            {f"{TWO}app/memory.max": str(300 * MB), f"{TWO}memory.max": str(200 * MB)},
            200 * MB,
            200 * MB,
        ),
        (
            {f"{TWO}app/memory.max": str(200 * MB), f"{TWO}app/memory.current": str(150 * MB)},
            200 * MB,
            50 * MB,
        ),
        (
            {
                f"{TWO}app/memory.max": str(200 * MB),
                f"{TWO}app/memory.current": str(150 * MB),
                f"{TWO}app/memory.stat": f"anon 5\ninactive_file {100 * MB}\nactive_file 7\n",
            },
            200 * MB,
            150 * MB,
        ),
        (
            {f"{TWO}app/memory.max": str(MB), f"{TWO}app/memory.current": str(2 * MB)},
            MB,
            0,
        ),
        (
            {
                f"{ONE}app/memory.limit_in_bytes": str(200 * MB),
                f"{ONE}app/memory.usage_in_bytes": str(150 * MB),
                f"{ONE}app/memory.stat": f"total_inactive_file {MB}\n",
            },
            200 * MB,
            51 * MB,
        ),
        ({f"{ONE}app/memory.limit_in_bytes": "9223372036854771712"}, 1_000_000 * KB, 600_000 * KB),
    ],
)
def test_the_limits_of_control_groups(
    tmp_path: Path, files: dict[str, str], total: int, available: int
) -> None:
    root = machine(tmp_path)
    write(root, **(VERSION_1 if any(ONE in path for path in files) else VERSION_2), **files)
    assert host_memory(root) == HostMemory(total, available)


@pytest.mark.parametrize("meminfo", ["", "MemTotal: many kB\n", "MemTotal:       5 kB\n"])
def test_without_meminfo_the_system_is_asked(tmp_path: Path, meminfo: str) -> None:
    memory = host_memory(machine(tmp_path, meminfo))
    assert memory.total_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < memory.available_bytes <= memory.total_bytes
