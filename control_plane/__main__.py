"""Starts the control plane: `python -m control_plane`, or `twinplane control`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the control plane until it is stopped; returns the exit code, 2 for wrong settings."""
    from twinplane.process.starting import prepare_plane

    prepare_plane()
    # Texts are tokenized one by one, on threads of our own (--tokenizer-threads).
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    from twinplane.process.logs import LogFormat, configure
    from twinplane.process.uncaught import log_what_nobody_caught
    from twinplane.settings.control import ControlConfig
    from twinplane.settings.known import known_settings
    from twinplane.settings.resolution import from_command_line

    config = from_command_line(
        ControlConfig,
        argv,
        os.environ,
        prog="twinplane control",
        description="Run the control plane alone. It serves clients and schedules one worker.",
        examples=("twinplane control --worker 127.0.0.1:50061",),
        table="control",
        known=known_settings(),
    )
    configure(config.log_level, LogFormat(config.log_format))
    log_what_nobody_caught()
    from control_plane.app import run

    return run(config)


if __name__ == "__main__":
    sys.exit(main())
