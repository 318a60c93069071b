"""What `twinplane up` prints: its own lines, and the log lines of the planes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Terminal:
    """Where the command `name` prints. Each line is flushed.

    Messages go to `output`; errors and the planes' logs go to `errors`.
    """

    name: str
    output: TextIO
    errors: TextIO

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
