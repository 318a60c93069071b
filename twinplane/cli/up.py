"""`twinplane up` runs both planes on this machine, as supervised child processes."""

from __future__ import annotations

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from twinplane import models
from twinplane.cli import planes, progress
from twinplane.cli.child import Plane, Restarting
from twinplane.cli.health import Health
from twinplane.cli.request_flags import quiet_grpc
from twinplane.cli.served_models import check_model
from twinplane.cli.socket_folder import private_folder
from twinplane.cli.supervisor import Supervisor
from twinplane.cli.terminal import Terminal, standard_terminal
from twinplane.cli.up_workers import UpWorker, replicas_of
from twinplane.client.values import DEFAULT_ADDRESS
from twinplane.extras import Extra, how_to_get, missing_modules
from twinplane.paths import as_text, expand_address
from twinplane.process.modules import module_arguments
from twinplane.process.standard_streams import restore_signals
from twinplane.process.starting import stop_signals
from twinplane.settings import resolution as settings
from twinplane.settings.command_parser import CommandParser
from twinplane.settings.control import USUAL_ADMIN_PORT, ControlConfig
from twinplane.settings.resolution import SettingsError
from twinplane.settings.worker import WorkerConfig

# A plane is killed this long after the time that it gives its running work.
_STOP_MARGIN_SECONDS = 5.0


def command_line() -> argparse.ArgumentParser:
    """What can be typed."""
    parser = CommandParser(
        "twinplane up",
        "Run the control plane and its workers on this machine. Ctrl-C stops all.",
        examples=(
            "twinplane up --pull",
            "twinplane up --model ~/models/mine --port 50052",
            "twinplane up --simulate",
        ),
        has_settings=True,
    )
    parser.add_argument("--pull", action="store_true", help="pull the model first if it is missing")
    planes.add_arguments(parser)
    return parser


def main(argv: Sequence[str]) -> int:
    """Returns 0 after Ctrl-C or SIGTERM, 1 when a plane ended for good, 2 when nothing could be
    started.
    """
    parser = command_line()
    namespace = planes.parse(parser, argv)
    quiet_grpc()
    with standard_terminal("twinplane up") as terminal:
        _end_when_asked(terminal)
        restore_signals()
        try:
            with private_folder(os.environ) as folder:
                return _up(namespace, os.environ, Path(folder), terminal)
        except (SettingsError, models.ModelError) as error:
            terminal.error(str(error))
            return 2


def _end_when_asked(terminal: Terminal) -> None:
    """Until the supervisor takes over, a signal ends this command at once; no plane runs yet."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        terminal.message(f"stopped: {signal.Signals(number).name}")
        raise SystemExit(0)

    for number in stop_signals():
        signal.signal(number, end)


def _up(
    namespace: argparse.Namespace,
    environ: Mapping[str, str],
    folder: Path,
    terminal: Terminal,
) -> int:
    worker = planes.resolve_worker(planes.worker_flags(namespace), environ)
    replicas = replicas_of(namespace, environ, worker, folder)
    control_flags = planes.control_flags(
        namespace, worker=_addresses(replicas), exit_with_parent=True
    )
    control = planes.resolve_control(control_flags, environ, worker)
    control_flags.model = control.model
    open_admin_port(control_flags, control, worker)
    if not worker.simulate and (missing := missing_modules(Extra.WORKER)):
        raise SettingsError(
            f"a worker with a model needs {' and '.join(missing)}: {how_to_get(Extra.WORKER)}; "
            "or add --simulate"
        )
    port = _listening_port(control)  # before a model is pulled, which may take long
    control_flags.port = str(port)
    for name in dict.fromkeys((control.model, worker.model)):
        is_loaded = name == worker.model and not worker.simulate
        check = partial(check_model, name) if is_loaded else models.no_check
        check(_ensure_model(name, check, pull=namespace.pull, weights=is_loaded))
    address = (
        expand_address(f"unix:{control.uds}")
        if control.uds
        else f"{_reachable(control.host)}:{port}"
    )
    name = as_text(control.served_model_name or worker.served_model_name or worker.model)
    children = (
        *(_worker_plane(each, worker) for ranks in replicas for each in ranks),
        replace(
            _plane(
                "control plane",
                "control_plane",
                control,
                control_flags,
                control.drain_grace_seconds,
            ),
            restarting=Restarting(
                Health(address), promise="Twinplane's clients go on with their answers"
            ),
        ),
    )
    ready = f"ready: {name} on {address}; try: {_example(address)}"
    return asyncio.run(Supervisor(children, Health(address), ready, terminal).run())


def open_admin_port(
    flags: argparse.Namespace, control: ControlConfig, worker: WorkerConfig
) -> None:
    """Where weights can be exchanged, somebody has to be able to ask for it."""
    if worker.weights_root is not None and control.admin_port is None:
        flags.admin_port = str(USUAL_ADMIN_PORT)


def _addresses(replicas: Sequence[Sequence[UpWorker]]) -> str:
    """The workers as the control plane's setting takes them."""
    return " ".join(",".join(each.address for each in ranks) for ranks in replicas)


def _worker_plane(worker: UpWorker, config: WorkerConfig) -> Plane:
    """How to run a worker, and how to start it again when it dies."""
    plane = _plane(worker.name, "worker_service", config, worker.flags, config.drain_seconds)
    return replace(
        plane,
        restarting=Restarting(Health(expand_address(worker.address))),
        variables=worker.variables,
    )


def _plane(
    name: str,
    module: str,
    config: ControlConfig | WorkerConfig,
    flags: argparse.Namespace,
    drain_seconds: float,
) -> Plane:
    """How to run the child process.

    Its standard error is a pipe, so the log format `auto` is decided here: text on a terminal. Each
    line of that begins with the plane's name.
    """
    as_text = config.log_format == "text" or (config.log_format == "auto" and sys.stderr.isatty())
    flags.log_format = "text" if as_text else "json"
    return Plane(
        name=name,
        arguments=(*module_arguments(module), *settings.to_arguments(type(config), flags)),
        grace_seconds=drain_seconds + _STOP_MARGIN_SECONDS,
        log_label=f"{name:13}" if as_text else "",
    )


def _ensure_model(name: str, check: Callable[[Path], None], *, pull: bool, weights: bool) -> Path:
    """The folder of the model, on this machine. Raises ModelNotFound, which says how to pull, and
    what `check` raises for a model that is to be pulled.

    A GGUF file is converted now, where the user sees the progress, instead of in both planes at
    once.
    """
    with progress.shown() as shown:
        try:
            return models.resolve(name, shown, weights=weights)
        except models.ModelNotFound:
            if not pull:
                raise
            return models.pull(name, shown, check, weights=weights)


def _listening_port(control: ControlConfig) -> int:
    """The port that clients will use. Raises SettingsError where the control plane could not
    listen.

    A free port is picked here because the ready line names it. A taken one is refused here because
    the server that holds it might answer in place of ours.
    """
    from twinplane.grpc.listen import CannotListen, check_addresses

    uds = Path(control.uds).expanduser() if control.uds else None
    try:
        return check_addresses(
            control.host, control.port, uds, control.metrics_host, control.metrics_port
        )
    except CannotListen as error:
        raise SettingsError(str(error)) from error


def _reachable(host: str) -> str:
    """The host name by which this machine reaches a server that listens on `host`."""
    match host:
        case "0.0.0.0":
            return "127.0.0.1"
        case "::":
            return "[::1]"
        case _:
            return f"[{host}]" if ":" in host else host


def _example(address: str) -> str:
    if address == DEFAULT_ADDRESS:
        return "twinplane chat"
    return f"twinplane chat --address {shlex.quote(address)}"
