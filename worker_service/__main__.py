"""Starts a worker: `python -m worker_service`, or `twinplane worker`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NoReturn


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Runs one worker until it is stopped, and ends the process. Raises SystemExit for wrong
    settings.
    """
    from twinplane.process.starting import prepare_plane

    prepare_plane()
    from twinplane.process.exit import exit_at_once
    from twinplane.process.logs import LogFormat, configure
    from twinplane.process.uncaught import log_what_nobody_caught
    from twinplane.settings.known import known_settings
    from twinplane.settings.resolution import from_command_line
    from twinplane.settings.worker import WorkerConfig
    from worker_service.threads import library_thread_variables, resolve_threads

    config = from_command_line(
        WorkerConfig,
        argv,
        os.environ,
        prog="twinplane worker",
        description="Run one worker alone: a device and a model, for a control plane.",
        examples=("twinplane worker --device cpu", "twinplane worker --simulate"),
        table="worker",
        known=known_settings(),
    )
    configure(config.log_level, LogFormat(config.log_format))
    log_what_nobody_caught()
    threads = resolve_threads(config.threads, sharers=config.local_world_size)
    for name, value in library_thread_variables(threads).items():
        os.environ.setdefault(name, value)
    from worker_service import app

    # Its device may still load or compute, in native code.
    exit_at_once(app.run(config))


if __name__ == "__main__":
    main()
