"""What `twinplane up` prints: its own lines, and the planes' logs with the plane's name before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Say:
    """Own news go to `output`, errors and logs to `errors`; every line is flushed."""

    name: str
    output: TextIO
    errors: TextIO

    def news(self, line: str) -> None:
        """Something a user waits for."""
        print(line, file=self.output, flush=True)

    def error(self, line: str) -> None:
        """Something that went wrong."""
        print(f"{self.name}: {' '.join(line.split())}", file=self.errors, flush=True)

    def log(self, label: str, line: bytes) -> None:
        """One line of a plane's log, without its line end; an empty label leaves it as it is."""
        text = line.decode(errors="replace")
        print(f"{label} | {text}" if label else text, file=self.errors, flush=True)
