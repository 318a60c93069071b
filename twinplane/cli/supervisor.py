"""Runs the planes together: ready when they serve, and when one ends or a signal comes, all end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from typing import Any, Protocol

from twinplane.cli.child import Child, Plane
from twinplane.cli.terminal import Say


class Readiness(Protocol):
    """Tells when clients can come."""

    async def serving(self) -> None:
        """Returns when they can."""
        ...


class Supervisor:
    """Starts `planes` in order and stops them in reverse order.

    The first SIGINT, SIGTERM or SIGHUP stops gracefully, a second one kills.
    """

    def __init__(
        self, planes: Sequence[Plane], readiness: Readiness, ready_line: str, say: Say
    ) -> None:
        self._planes = planes
        self._readiness = readiness
        self._ready_line = ready_line
        self._say = say
        self._children: list[Child] = []
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Returns 0 when a signal ended it, 1 when a plane died or had to be killed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._on_signal)
        try:
            for plane in self._planes:
                self._children.append(await Child.start(plane, self._say))
            dead = await self._first_death()
            if dead is not None:
                self._say.error(f"{dead.epitaph()}; stopping")
        finally:
            for child in reversed(self._children):
                await child.stop()
        killed = any(child.exit_code == -signal.SIGKILL for child in self._children)
        return 1 if dead is not None or killed else 0

    def _on_signal(self) -> None:
        if self._stop.is_set():
            for child in self._children:
                child.kill()
        self._stop.set()

    async def _first_death(self) -> Child | None:
        """The first plane that ends of itself, or None when a signal came."""
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(self._stop.wait())
        deaths = {asyncio.create_task(child.wait()): child for child in self._children}
        tasks: set[asyncio.Task[Any]] = {stopping, announcing, *deaths}
        try:
            while True:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if stopping in done:
                    return None
                for task, child in deaths.items():
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
        self._say.news(self._ready_line)
