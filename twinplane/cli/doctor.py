"""`twinplane doctor` checks this machine for `twinplane up` with the same flags.

It prints one line for each finding, with the fix where there is one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from twinplane.cli import doctor_checks as checks
from twinplane.cli import planes
from twinplane.cli.doctor_checks import Finding, State
from twinplane.cli.up_workers import worker_count
from twinplane.models import cache_root
from twinplane.settings.command_parser import CommandParser
from twinplane.settings.control import ControlConfig
from twinplane.settings.resolution import SettingsError, to_arguments
from twinplane.settings.worker import WorkerConfig

_COLOURS = {State.OK: "32", State.WARN: "33", State.FAIL: "31"}


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane doctor",
        "Check this machine for `twinplane up` with the same settings.",
        notes=("exit codes: 0 `twinplane up` would start, 1 it would not, 2 wrong usage", ""),
        examples=("twinplane doctor", "twinplane doctor --model ~/models/mine --json"),
        has_settings=True,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array, for scripts")
    planes.add_arguments(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 1 when something stops `twinplane up`, else 0. Exits with 2 for wrong settings."""
    parser = command_line()
    namespace = planes.parse(parser, argv)
    try:
        worker = planes.resolve_worker(planes.worker_flags(namespace), os.environ)
        control = planes.resolve_control(planes.control_flags(namespace), os.environ, worker)
    except SettingsError as error:
        parser.exit(2, f"twinplane doctor: {error}\n")
    options = to_arguments(WorkerConfig, _first_worker(namespace, worker))
    findings = [finding for check in _checks(control, worker, options) for finding in check()]
    if namespace.json:
        print(json.dumps([finding.as_json() for finding in findings], indent=2))
    else:
        width = max(len(finding.subject) for finding in findings)
        for finding in findings:
            print(_line(finding, width, sys.stdout))
    return 1 if any(finding.state is State.FAIL for finding in findings) else 0


def _first_worker(namespace: argparse.Namespace, worker: WorkerConfig) -> argparse.Namespace:
    """The flags of the first worker that `up` would start."""
    count = worker_count(worker)
    if count == 1:
        return planes.worker_flags(namespace)
    return planes.worker_flags(namespace, rank=0, data_parallel_rank=0, local_world_size=count)


def _checks(
    control: ControlConfig, worker: WorkerConfig, worker_options: Sequence[str]
) -> tuple[Callable[[], list[Finding]], ...]:
    return (
        checks.check_python,
        checks.check_packages,
        lambda: checks.check_worker(worker_options),
        checks.check_event_loop,
        lambda: checks.check_ports(control),
        lambda: checks.check_socket_folder(os.environ),
        lambda: checks.check_cache(cache_root),
        lambda: checks.check_models(
            (control.model, worker.model), None if worker.simulate else worker.model
        ),
        lambda: checks.check_text(control),
    )


def _line(finding: Finding, width: int, output: TextIO) -> str:
    """One line for people, with the subject padded to `width`."""
    state = f"{finding.state.value:4}"
    if output.isatty():
        state = f"\x1b[{_COLOURS[finding.state]}m{state}\x1b[0m"
    fix = f"; fix: {finding.fix}" if finding.fix else ""
    return f"{state}  {finding.subject:{width}}  {finding.detail}{fix}"
