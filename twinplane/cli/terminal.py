"""What `twinplane up` prints: its own lines, and the log lines of the planes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from twinplane.process.line_writer import LineWriter, text_stream

_LAST_LINES_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where the command `name` prints. Each line is flushed.

    Messages go to `output`; errors and the planes' logs go to `errors`. `keeps_up` says whether
    the reader of the errors does; while it doesn't, log lines should be left where they are.
    """

    name: str
    output: TextIO
    errors: TextIO
    keeps_up: Callable[[], bool] = lambda: True

    def message(self, line: str) -> None:
        """Prints what the user waits for."""
        print(line, file=self.output, flush=True)

    def error(self, line: str) -> None:
        """Prints what went wrong, after the command's name."""
        print(f"{self.name}: {' '.join(line.split())}", file=self.errors, flush=True)

    def log(self, label: str, line: bytes) -> None:
        """Prints one line of a plane's log, given without its line end, after the label if any."""
        text = line.decode(errors="replace")
        print(f"{label} | {text}" if label else text, file=self.errors, flush=True)


@contextmanager
def standard_terminal(name: str) -> Iterator[Terminal]:
    """A Terminal on standard output and error that never waits for their readers.

    The end waits a moment for the last lines.
    """
    output, errors = (_writer(name, stream) for stream in (sys.stdout, sys.stderr))
    terminal = Terminal(
        name,
        text_stream(output, sys.stdout.encoding, isatty=sys.stdout.isatty()),
        text_stream(errors, sys.stderr.encoding, isatty=sys.stderr.isatty()),
        keeps_up=lambda: errors.has_room,
    )
    try:
        yield terminal
    finally:
        for writer in (output, errors):
            writer.flush(_LAST_LINES_SECONDS)


def _writer(name: str, stream: TextIO) -> LineWriter:
    stream.flush()
    return LineWriter(
        stream.fileno(), lambda count: f"{name}: {count} lines were dropped\n".encode()
    )
