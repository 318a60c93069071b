"""The settings of both planes on one command line, for `up` and `doctor`."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping, Sequence

from twinplane.settings import hints
from twinplane.settings import resolution as settings
from twinplane.settings.control import ControlConfig
from twinplane.settings.known import known_settings
from twinplane.settings.resolution import Settings
from twinplane.settings.worker import WorkerConfig

# `up` sets these itself: they say how the planes find each other and end together.
_SET_BY_UP = (
    *("worker", "worker_id", "exit_with_parent"),
    *("rank", "data_parallel_rank", "local_world_size", "rendezvous_host", "rendezvous_port"),
)
# Clients connect to the control plane; the worker listens on a private socket.
_CONTROL_ONLY = ("host", "port", "uds", "metrics_host")
# One machine has one port of a number: beside each other, the control plane has the metrics'.
_OF_THE_WORKER = {"metrics_port": "none"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of both planes, except those that `up` sets itself."""
    settings.add_arguments(parser, ControlConfig, WorkerConfig, without=_SET_BY_UP)


def parse(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The arguments, by a parser with these flags."""
    set_by_up = dict.fromkeys(_SET_BY_UP, "is set by `twinplane up` itself")
    return hints.parse(parser, argv, elsewhere=set_by_up)


def control_flags(namespace: argparse.Namespace, **decided: object) -> argparse.Namespace:
    """The control plane's flags, with the `decided` values in place of what was given."""
    return _changed(namespace, (), decided)


def worker_flags(namespace: argparse.Namespace, **decided: object) -> argparse.Namespace:
    """The worker's flags, with the `decided` values in place of what was given."""
    return _changed(namespace, _CONTROL_ONLY, {**_OF_THE_WORKER, **decided})


def resolve_control(
    flags: argparse.Namespace, environ: Mapping[str, str], worker: WorkerConfig
) -> ControlConfig:
    """The control plane's settings: the model is the worker's unless they name one.

    Raises SettingsError.
    """
    return _resolve(ControlConfig, flags, environ, "control", {"model": worker.model})


def resolve_worker(flags: argparse.Namespace, environ: Mapping[str, str]) -> WorkerConfig:
    """The worker's settings. Raises SettingsError."""
    return _resolve(WorkerConfig, flags, environ, "worker", {})


def _changed(
    namespace: argparse.Namespace, without: Collection[str], values: Mapping[str, object]
) -> argparse.Namespace:
    kept = {name: value for name, value in vars(namespace).items() if name not in without}
    return argparse.Namespace(**{**kept, **values})


def _resolve(
    cls: type[Settings],
    flags: argparse.Namespace,
    environ: Mapping[str, str],
    table: str,
    defaults: Mapping[str, object],
) -> Settings:
    file = settings.config_file(flags, environ)
    known = known_settings()
    return settings.resolve(cls, flags, environ, file, table, known=known, defaults=defaults)
