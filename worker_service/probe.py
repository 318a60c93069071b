"""`python -m worker_service.probe`: what a worker finds on this machine, as one JSON object.

`twinplane doctor` runs it as a process of its own, because it imports torch, compiles the CPU
kernels unless they are there, and may take long or die.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace

from twinplane.models import ModelError, ModelNotFound
from twinplane.settings.known import known_settings
from twinplane.settings.resolution import from_command_line
from twinplane.settings.worker import WorkerConfig
from worker_service.kernels.cpu.compiler import (
    KernelsUnavailable,
    default_cache,
    ensure_library,
    find_toolchain,
)
from worker_service.load_errors import LoadError
from worker_service.startup import StartCheck, StartupError, check_start, check_without_model
from worker_service.threads import resolve_threads


@dataclass(frozen=True, slots=True)
class Report:
    """The answer. Of each pair of a thing and its error, one is empty.

    `start` says what a start would give. It and `start_error` are both empty where the model is not
    on this machine and nothing else stops a start. `refusals` says for each executor why it can't
    run the model with these settings; None when it can. A simulated worker needs no compiler, no
    torch and no executor: what they are is not looked at.
    """

    threads: int
    threads_source: str
    compiler: str = ""
    compiler_error: str = ""
    torch: str = ""
    torch_error: str = ""
    devices: tuple[str, ...] = ()
    refusals: Mapping[str, str | None] = field(default_factory=dict)
    start: str = ""
    start_error: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report; returns 0. Exits with 2 for wrong settings, as a worker does."""
    config = from_command_line(
        WorkerConfig,
        argv,
        os.environ,
        prog="python -m worker_service.probe",
        description="What a worker with these options finds here, as JSON. Nothing is loaded.",
        table="worker",
        known=known_settings(),
    )
    print(json.dumps(asdict(probe(config, os.environ))))
    return 0


def probe(config: WorkerConfig, environment: Mapping[str, str]) -> Report:
    """Looks at the threads, the compiler, torch and its devices, each executor, and whether a start
    with these settings would succeed."""
    threads = resolve_threads(config.threads, sharers=config.local_world_size)
    report = Report(threads.count, threads.source)
    if config.simulate:
        return _with_start(report, config)
    try:
        import torch
    except (ImportError, OSError) as error:  # not installed, or a library of its own is missing
        report = _with_compiler(replace(report, torch_error=str(error)), environment, build=False)
        return _with_start(report, config)
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = (f"cuda:{index} ({torch.cuda.get_device_name(index)})" for index in range(gpu_count))
    report = replace(report, torch=torch.__version__, devices=("cpu", *gpus))
    return _with_start(_with_compiler(report, environment, build=True), config)


def _with_start(report: Report, config: WorkerConfig) -> Report:
    try:
        check = _check(config)
        return replace(report, start=check.summary, refusals=check.refusals)
    except (StartupError, ModelError, LoadError) as error:
        return replace(report, start_error=str(error))
    except Exception as error:  # bad model files can raise anything, and stop a worker as well
        return replace(report, start_error=f"{type(error).__name__}: {error}")


def _check(config: WorkerConfig) -> StartCheck:
    try:
        return check_start(config)
    except ModelNotFound:  # others say so, with the way to get it
        if config.simulate:
            return StartCheck("", {})
        return check_without_model(config)


def _with_compiler(report: Report, environment: Mapping[str, str], *, build: bool) -> Report:
    try:
        return replace(report, compiler=_compiler(environment, build=build))
    except KernelsUnavailable as unavailable:
        return replace(report, compiler_error=str(unavailable))


def _compiler(environment: Mapping[str, str], *, build: bool) -> str:
    """What the compiler says of itself, if it can build the kernels or they are there already.

    A worker's own build answers that; without torch there is none. Raises KernelsUnavailable.
    """
    if not build:
        return find_toolchain(environment).version
    library = ensure_library(default_cache(environment), lambda line: None, environment)
    try:
        return find_toolchain(environment).version
    except KernelsUnavailable:
        return f"none is needed, the kernels are built: {library}"


if __name__ == "__main__":
    sys.exit(main())
