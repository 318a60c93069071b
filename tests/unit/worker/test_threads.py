"""The default number of threads, from fake trees of /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from worker_service.threads import resolve_threads


def tree(root: Path, files: dict[str, str]) -> Path:
    """Writes files below `root`, which is returned."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_setting_wins(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000"})
    threads = resolve_threads(7, root=root, processors=range(4))
    assert threads.count == 7
    assert "setting" in threads.source


def test_without_a_quota_each_core_gets_one(tmp_path: Path) -> None:
    threads = resolve_threads(None, root=tmp_path, processors={1, 3, 5})
    assert threads.count == 3
    assert "cores" in threads.source


def test_threads_of_one_core_count_once(tmp_path: Path) -> None:
    siblings = {0: "0,4", 1: "1,5", 4: "0,4", 5: "1,5"}
    files = {
        f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list": f"{text}\n"
        for number, text in siblings.items()
    }
    root = tree(tmp_path, files)
    assert resolve_threads(None, root=root, processors=siblings).count == 2
    assert resolve_threads(None, root=root, processors={0, 1}).count == 2
    assert resolve_threads(None, root=root, processors={0, 4}).count == 1


V1 = "4:memory:/a\n3:cpu,cpuacct:/a/b\n0::/\n"
QUOTAS: dict[str, tuple[dict[str, str], int]] = {
    "v2": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    "v2 rounds up": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "150000 100000"}, 2),
    "v2 below one": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "5000 100000"}, 1),
    "v2 no limit": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
    "v2 above the cores": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "9000 100"}, 8),
    "v2 own group": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "300000 100000",
            "sys/fs/cgroup/a/cpu.max": "max 100000",
        },
        3,
    ),
    "v2 the least of those above": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "600000 100000",
            "sys/fs/cgroup/a/cpu.max": "500000 100000",
        },
        5,
    ),
    "v2 a path of the host": (
        {"proc/self/cgroup": "0::/kube/pod/x", "sys/fs/cgroup/cpu.max": "400000 100000"},
        4,
    ),
    "v2 a path outside": (
        {"proc/self/cgroup": "0::/../../x", "sys/fs/cgroup/cpu.max": "400000 100000"},
        4,
    ),
    "v2 nonsense": ({"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "soon"}, 8),
    "v1": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us": "350000\n",
            "sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
        },
        4,
    ),
    "v1 in a container": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "20000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "10000\n",
        },
        2,
    ),
    "v1 no limit": (
        {
            "proc/self/cgroup": V1,
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
        },
        8,
    ),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_a_quota_bounds_the_threads(name: str, tmp_path: Path) -> None:
    files, expected = QUOTAS[name]
    threads = resolve_threads(None, root=tree(tmp_path, files), processors=range(8))
    assert threads.count == expected
    assert ("quota" in threads.source) == (expected < 8)


def test_this_machine_has_a_number() -> None:
    assert resolve_threads(None).count >= 1
