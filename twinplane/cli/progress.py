"""Draws a Progress: bars on a terminal, and one line per stage elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress import (
    Progress as Bars,
)

from twinplane.models import Progress


class _BarProgress:
    """Draws one bar per stage. The bar of a finished stage stays and shows its time."""

    def __init__(self, bars: Bars) -> None:
        self._bars = bars
        self._stage: TaskID | None = None

    def stage(self, title: str, total: int | None = None) -> None:
        self.finish()
        self._stage = self._bars.add_task(title, total=total)

    def advance(self, amount: int) -> None:
        if self._stage is not None:
            self._bars.advance(self._stage, amount)

    def finish(self) -> None:
        """Ends the current stage."""
        if self._stage is not None:
            total = self._bars.tasks[self._stage].total
            self._bars.update(self._stage, total=total or 1, completed=total or 1)
            self._bars.stop_task(self._stage)


class _LineProgress:
    """Prints one line per stage."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def stage(self, title: str, total: int | None = None) -> None:
        size = "" if total is None else f" {total / 1e6:.0f} MB"
        self._console.print(f"{title}{size}…", highlight=False)

    def advance(self, amount: int) -> None:
        del amount


@contextmanager
def shown() -> Iterator[Progress]:
    """A Progress on standard error, while the `with` block runs."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _LineProgress(console)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:12}"),
        BarColumn(),
        DownloadColumn(),
        TimeElapsedColumn(),
    )
    with Bars(*columns, console=console) as bars:
        progress = _BarProgress(bars)
        yield progress
        progress.finish()
