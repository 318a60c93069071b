"""Signals that arrive before there is an event loop to take them. Imports next to nothing, because
it has to be there before everything that takes long."""

from __future__ import annotations

import signal
import sys
from types import FrameType


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
