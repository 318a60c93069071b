"""The end of a process that does not wait for its threads."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn


def exit_at_once(code: int) -> NoReturn:
    """Ends the process with `code`, after what was printed and logged has left it.

    Takes with it what it has started, such as compilers. The interpreter's own exit ends threads
    where they stand in native code. Some of gRPC's and of the devices' abort the whole process
    then.
    """
    _flush()
    _kill_children()
    os._exit(code)


def exit_by(number: signal.Signals) -> NoReturn:
    """Ends the process as this signal would have: a shell sees 128 + its number."""
    if number is not signal.SIGINT:  # for Ctrl-C every command has that as its exit code
        _flush()
        _kill_children()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    exit_at_once(128 + number)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has gone
            stream.flush()
    logging.shutdown()


def _kill_children() -> None:
    """Where the system tells which they are; elsewhere they end by themselves."""
    for thread in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has gone
            for child in thread.read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)
