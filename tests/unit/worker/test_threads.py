"""The default number of threads, from fake trees of /proc and /sys."""

from __future__ import annotations

import math
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.planes import ROOT, plane_environment
from worker_service.threads import ThreadCount, library_thread_variables, resolve_threads


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


def random_tree(rng: random.Random) -> tuple[dict[str, str], float | None]:
    """Files of nested control groups, and the quota that they leave: the least one on the path."""
    parts = [rng.choice("abc") for _ in range(rng.randrange(4))]
    version = rng.choice((1, 2))
    period = rng.choice((1000, 10_000, 100_000, 1_000_000))
    line = "0::" if version == 2 else rng.choice(("5:cpu,cpuacct:", "11:cpuacct,cpu:", "2:cpu:"))
    mount = "sys/fs/cgroup" if version == 2 else "sys/fs/cgroup/cpu"
    if line == "5:cpu,cpuacct:":
        mount += ",cpuacct"
    files = {"proc/self/cgroup": f"7:memory:/m\n{line}/{'/'.join(parts)}\n1:name=systemd:/x\n"}
    quotas = []
    for depth in range(len(parts) + 1):
        kind = rng.choice(("none", "unlimited", "quota", "quota", "broken"))
        quota = round(rng.choice((0.1, 0.5, 1, 1.5, 2, 2.01, 3.999, 7, 64)) * period)
        text = {"unlimited": "max" if version == 2 else "-1", "broken": "?"}.get(kind, str(quota))
        group = "/".join((mount, *parts[:depth]))
        if kind == "none":
            continue
        if kind == "quota":
            quotas.append(quota / period)
        if version == 2:
            files[f"{group}/cpu.max"] = f"{text} {period}\n"
        else:
            files[f"{group}/cpu.cfs_quota_us"] = text
            files[f"{group}/cpu.cfs_period_us"] = str(period)
    return files, min(quotas, default=None)


@pytest.mark.parametrize("seed", range(80))
def test_the_least_quota_on_the_path_bounds_the_threads(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    files, quota = random_tree(rng)
    processors = rng.sample(range(96), rng.choice((1, 2, 5, 8, 64)))
    threads = resolve_threads(None, root=tree(tmp_path, files), processors=processors)
    bound = len(processors) if quota is None else math.ceil(quota)
    assert threads.count == max(1, min(len(processors), bound))
    assert resolve_threads(3, root=tmp_path, processors=processors).count == 3


@pytest.mark.parametrize(
    "text", ["", "\n", "x", "::", "0::", "0::/\n\n", "a:b:c:d", "0:cpu", "\udcff"]
)
def test_any_list_of_groups_is_read(text: str, tmp_path: Path) -> None:
    path = tmp_path / "proc/self/cgroup"
    path.parent.mkdir(parents=True)
    path.write_bytes(text.encode(errors="surrogateescape"))
    assert resolve_threads(None, root=tmp_path, processors={0, 1}).count == 2


def test_a_process_on_one_processor_has_one_thread() -> None:
    """As `taskset` and cpusets say it. The libraries' pools are as large, too."""
    code = (
        "import os\n"
        "from worker_service.threads import library_thread_variables, resolve_threads\n"
        "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])\n"
        "os.environ.update(library_thread_variables(resolve_threads(None)))\n"
        "import numpy, torch\n"
        "torch.ones(512, 512) @ torch.ones(512, 512)\n"
        "numpy.ones((512, 512)) @ numpy.ones((512, 512))\n"
        "print(len(os.listdir('/proc/self/task')), torch.get_num_threads())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, check=True, cwd=ROOT, env=plane_environment(),
    )  # fmt: skip
    assert done.stdout.split() == ["1", "1"]


def test_the_libraries_are_told_the_number() -> None:
    variables = library_thread_variables(ThreadCount(3, "a test"))
    assert set(variables.values()) == {"3"}
    assert "OMP_NUM_THREADS" in variables
