"""Runs the planes together. When one of them ends or a signal arrives, all are stopped."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any, Protocol

from twinplane.cli.child import Child, Plane
from twinplane.cli.terminal import Terminal
from twinplane.process.starting import stop_signals


class Readiness(Protocol):
    """Knows when the planes serve clients."""

    async def serving(self) -> None:
        """Returns when they do."""
        ...


class Supervisor:
    """Starts `planes` in order and stops them in reverse order.

    It prints `ready_line` once the planes serve. The first SIGINT, SIGTERM or SIGHUP stops the
    planes gracefully; a second one kills them.
    """

    def __init__(
        self, planes: Sequence[Plane], readiness: Readiness, ready_line: str, terminal: Terminal
    ) -> None:
        self._planes = planes
        self._readiness = readiness
        self._ready_line = ready_line
        self._terminal = terminal
        self._children: list[Child] = []
        self._stop = asyncio.Event()
        self._reason = ""
        """The signal that set `_stop`."""

    async def run(self) -> int:
        """Returns 0 after a signal, 1 when a plane ended by itself or had to be killed.

        The last line that is printed says why.
        """
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            for plane in self._planes:
                self._children.append(await Child.start(plane, self._terminal))
            ended = await self._first_exit()
            if ended is not None:
                self._terminal.error(f"{ended.describe_exit()}; stopping")
        finally:
            for child in reversed(self._children):
                await child.stop()
        failed = [child for child in self._children if child.exit_code != 0]
        if ended is not None and not (self._stop.is_set() and not failed):
            self._terminal.error(f"stopped: {ended.describe_exit()}")
            return 1
        self._terminal.message(f"stopped: {self._reason}")
        return 1 if any(child.exit_code == -signal.SIGKILL for child in failed) else 0

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            for child in self._children:
                child.kill()
            return
        self._reason = number.name
        self._stop.set()

    async def _first_exit(self) -> Child | None:
        """The first plane that ends by itself, or None when a signal arrived."""
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(self._stop.wait())
        exits = {asyncio.create_task(child.wait()): child for child in self._children}
        tasks: set[asyncio.Task[Any]] = {stopping, announcing, *exits}
        try:
            while True:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if stopping in done:
                    return None
                for task, child in exits.items():
                    if task in done:
                        return child
                announcing.result()
                tasks.discard(announcing)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _announce(self) -> None:
        await self._readiness.serving()
        self._terminal.message(self._ready_line)
