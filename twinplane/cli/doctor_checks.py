"""The doctor's checks: each looks at one thing and returns findings. torch stays outside this
process; a child imports it."""

from __future__ import annotations

import json
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

from twinplane import models
from twinplane.models.cache import ModelCache
from twinplane.models.catalogue import find_in_catalogue
from twinplane.models.hub import is_hub_id
from twinplane.settings.control import ControlConfig

_BASE = ("grpcio", "protobuf", "tokenizers", "numpy", "jinja2", "huggingface-hub")
_WORKER = ("safetensors", "gguf")
_DEFAULT_MODEL_BYTES = 1_000_000_000  # the pull's peak: wheel, GGUF and weights side by side
_INSTALL_WORKER = "pip install 'twinplane[worker]'"

# Runs in a process of its own, which may take long or die; prints one JSON object. Compiles the CPU
# kernels if no worker has.
_PROBE = """
import json, torch
answer = {"torch": torch.__version__, "devices": [], "backends": {}}
answer["devices"].append(f"cpu ({torch.get_num_threads()} threads)")
for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
    answer["devices"].append(f"cuda:{index} ({torch.cuda.get_device_name(index)})")
from worker_service.attention.interface import AttentionConfig
from worker_service.domain.capability import DataType, Limits
from worker_service.runner.forward_pass import PassConfig
from worker_service.runner.options import Quantization
from worker_service.runner.selection import PASSES
on_gpu = torch.cuda.is_available()
data_type = DataType.BFLOAT16 if on_gpu else DataType.FLOAT32
attention = AttentionConfig(
    head_count=9, kv_head_count=3, head_dim=64, scale=0.125, layer_windows=(None,), block_size=16,
    max_length=1024, data_type=getattr(torch, data_type.value),
    device=torch.device("cuda" if on_gpu else "cpu"),
)
config = PassConfig(
    attention=attention, limits=Limits(1, 1, 1024, 1024), quantization=Quantization.NONE,
    kv_data_type=data_type, thread_count=None, progress=lambda line: None,
)
for kind in PASSES:
    answer["backends"][kind.name] = kind.probe(config)
print(json.dumps(answer))
"""


class State(Enum):
    """FAIL stops `twinplane up`; WARN makes something slower or unavailable."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was found, and the fix unless it is OK."""

    state: State
    subject: str
    detail: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        """The same, for machines."""
        return {
            "state": self.state.value,
            "subject": self.subject,
            "detail": self.detail,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class DeviceProbe:
    """What the child process said. `error` is set when it couldn't; a backend's answer is None
    when it can run."""

    torch: str
    devices: tuple[str, ...]
    backends: Mapping[str, str | None]
    error: str = ""


def check_python() -> list[Finding]:
    """The interpreter's version."""
    where = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return [Finding(State.OK, "python", where)]


def check_packages() -> list[Finding]:
    """The base install has to be whole; without the worker's packages only --simulate works."""
    found = {name: _version(name) for name in (*_BASE, *_WORKER)}
    missing = [name for name in _BASE if found[name] is None]
    extra = [name for name in _WORKER if found[name] is None]
    listed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    findings = [Finding(State.OK, "packages", listed)]
    if missing:
        findings.append(
            Finding(
                State.FAIL, "packages", f"missing: {', '.join(missing)}", "pip install twinplane"
            )
        )
    if extra:
        findings.append(
            Finding(State.FAIL, "worker packages", f"missing: {', '.join(extra)}", _INSTALL_WORKER)
        )
    return findings


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def probe_device(timeout_seconds: float = 120.0) -> DeviceProbe:
    """Asks a child process that imports torch."""
    try:
        result = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return DeviceProbe("", (), {}, f"no answer in {timeout_seconds:.0f} s")
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        return DeviceProbe("", (), {}, lines[-1] if lines else f"exit code {result.returncode}")
    answer = json.loads(result.stdout.splitlines()[-1])
    return DeviceProbe(answer["torch"], tuple(answer["devices"]), answer["backends"])


def check_device(probe: DeviceProbe) -> list[Finding]:
    """torch, its devices, and what each attention backend answers."""
    if probe.error:
        return [
            Finding(
                State.FAIL, "torch", probe.error, f"{_INSTALL_WORKER} (or twinplane up --simulate)"
            )
        ]
    findings = [
        Finding(State.OK, "torch", probe.torch),
        Finding(State.OK, "devices", ", ".join(probe.devices)),
    ]
    for name, refusal in probe.backends.items():
        if refusal is None:
            findings.append(Finding(State.OK, f"attention {name}", "can run"))
        else:
            findings.append(
                Finding(State.WARN, f"attention {name}", refusal, "none needed: the next is used")
            )
    if probe.backends and all(refusal is not None for refusal in probe.backends.values()):
        findings.append(
            Finding(State.FAIL, "attention", "no backend can run here", _INSTALL_WORKER)
        )
    return findings


def check_event_loop() -> list[Finding]:
    """uvloop, which serves more streams per core."""
    version = _version("uvloop")
    if version is None:
        return [Finding(State.WARN, "uvloop", "missing: streams are slower", "pip install uvloop")]
    return [Finding(State.OK, "uvloop", version)]


def check_compiler(environ: Mapping[str, str]) -> list[Finding]:
    """A C++ compiler, for the compiled CPU kernels."""
    names = (environ.get("CXX", "").split(" ")[0], "c++", "g++", "clang++")
    path = next((found for name in names if name and (found := shutil.which(name))), None)
    if path is None:
        return [
            Finding(
                State.WARN,
                "compiler",
                "no C++ compiler: torch's own kernels are used",
                "install g++ or clang++",
            )
        ]
    return [Finding(State.OK, "compiler", path)]


def check_ports(config: ControlConfig) -> list[Finding]:
    """The ports the control plane would listen on; 0 is any free one, and needs no check."""
    findings = []
    if config.port and not config.uds:
        findings.append(_check_port("port", config.host, config.port, "--port"))
    if config.metrics_port:
        findings.append(
            _check_port("metrics port", config.metrics_host, config.metrics_port, "--metrics-port")
        )
    return findings


def _check_port(subject: str, host: str, port: int, flag: str) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return Finding(
                State.FAIL,
                subject,
                f"{port} on {host}: {error.strerror}",
                f"stop what listens there, or twinplane up {flag} N",
            )
    return Finding(State.OK, subject, f"{port} is free")


def check_cache(root: Path) -> list[Finding]:
    """Where models are kept, which there are, and the room left for another."""
    cache = ModelCache(root)
    names = [folder.name for folder in cache.folders()]
    findings = [Finding(State.OK, "model cache", f"{root}: {', '.join(names) or 'empty'}")]
    existing = next(path for path in (root, *root.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < _DEFAULT_MODEL_BYTES:
        findings.append(
            Finding(
                State.WARN,
                "disk",
                f"{free / 1e9:.1f} GB free at {existing}",
                "make room, or set TWINPLANE_HOME to another disk",
            )
        )
    else:
        findings.append(Finding(State.OK, "disk", f"{free / 1e9:.1f} GB free"))
    return findings


def check_models(names: Iterable[str]) -> list[Finding]:
    """Whether each model is on this machine. A .gguf file is not converted here."""
    return [_check_model(name) for name in dict.fromkeys(names)]


def _check_model(name: str) -> Finding:
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return Finding(State.OK, "model", f"{path}: a GGUF file, converted on first use")
    try:
        return Finding(State.OK, "model", f"{name}: {models.resolve(name)}")
    except models.ModelNotFound as error:
        if find_in_catalogue(name) or is_hub_id(name):
            return Finding(
                State.FAIL, "model", f"{name} is missing", f"twinplane model pull {name}"
            )
        return Finding(State.FAIL, "model", str(error), "another --model")
    except models.ModelError as error:
        return Finding(State.FAIL, "model", str(error), "another --model")
