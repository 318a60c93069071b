"""Standard input, output and error, as a command can rely on them."""

from __future__ import annotations

import io
import os
import resource
import signal
import sys

_NEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPROF)
_OPEN_FILES = 1 << 20
_PARTIAL = ("strict", "surrogateescape")
_STANDARD = ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w"))


def prepare_standard_streams() -> None:
    """Opens the null device for each that is closed, and lets output hold any character.

    Without that the next file or socket would take a closed one's number, and get what native code
    writes to it. A character that the locale's encoding lacks becomes a question mark. Call it
    before anything else is opened.
    """
    for descriptor, name, mode in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            stream = open(descriptor, mode, encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
    # The POSIX locale's way, surrogateescape, takes no more characters than the strict one.
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors in _PARTIAL:
        sys.stdout.reconfigure(errors="replace")


def restore_signals() -> None:
    """Undoes what whoever started this process did to its signals: it must be able to wait for its
    children, and to be told to stop."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _NEEDED)


def raise_open_file_limit() -> None:
    """Lets this process open as many files and connections as the system allows it to."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
