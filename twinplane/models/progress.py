"""How long work reports its progress. The command line draws it; library callers may ignore it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Is told of stages, one after the other."""

    def stage(self, title: str, total: int | None = None) -> None:
        """Ends the stage before and begins one of `total` bytes, None when that is not known."""
        ...

    def advance(self, amount: int) -> None:
        """Adds `amount` bytes to the current stage."""
        ...


class NoProgress:
    """Ignores all progress."""

    def stage(self, title: str, total: int | None = None) -> None:
        """Ignored."""

    def advance(self, amount: int) -> None:
        """Ignored."""
