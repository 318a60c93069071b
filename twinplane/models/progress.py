"""How long work reports how far it is; the command line draws it, a library caller ignores it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """A sequence of stages, one at a time."""

    def stage(self, title: str, total: int | None = None) -> None:
        """Begins a stage of `total` units (bytes), or of unknown length; ends the one before."""
        ...

    def advance(self, amount: int) -> None:
        """Moves the present stage on."""
        ...


class NoProgress:
    """Reports nothing."""

    def stage(self, title: str, total: int | None = None) -> None:
        """Ignored."""

    def advance(self, amount: int) -> None:
        """Ignored."""
