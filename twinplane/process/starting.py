"""What a plane's process does first. Imports next to nothing, because it has to be there before
everything that takes long."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from twinplane.process.standard_streams import (
    prepare_standard_streams,
    raise_open_file_limit,
    restore_signals,
)


def prepare_plane() -> None:
    """Makes this process what a plane relies on, whoever started it. Call it before any import
    that takes long and before gRPC's.
    """
    prepare_standard_streams()
    # Before signals are let through: one that has waited would end the process as by default.
    end_at_once_when_asked()
    raise_open_file_limit()
    restore_signals()
    # gRPC reads these once, when it is imported. Nothing here forks, and what gRPC would write to
    # stderr by itself is logged where it is noticed.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a process to stop. A hangup is none under nohup, which ignores it."""
    signals = (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signals
    return (*signals, signal.SIGHUP)


def end_at_once_when_asked() -> None:
    """Until StopSignals takes over, a signal ends this process at once, well: nothing runs yet."""
    for number in stop_signals():
        signal.signal(number, _end_at_once)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    import logging

    from twinplane.process.exit import exit_at_once
    from twinplane.process.logs import fields

    reason = f"{signal.Signals(number).name} while it started"
    try:
        if logging.getLogger().handlers:
            logging.getLogger(__name__).info("stopped", extra=fields(reason=reason))
        else:  # how to log is among the settings, which are not known yet
            sys.stderr.write(f"stopped: {reason}\n")
    finally:  # a signal may come in the middle of another line
        exit_at_once(0)
