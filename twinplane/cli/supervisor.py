"""Runs the planes together. When one of them ends for good or a signal arrives, all are stopped."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from twinplane.cli.child import Plane, Readiness
from twinplane.cli.keeper import Keeper
from twinplane.cli.terminal import Terminal
from twinplane.process.starting import stop_signals


class Supervisor:
    """Starts `planes` in order and stops them in reverse order.

    It prints `ready_line` once `readiness` says that the planes serve. A plane with a policy for it
    is started again when it dies. The first SIGINT, SIGTERM or SIGHUP stops the planes gracefully;
    a second one kills them.
    """

    def __init__(
        self,
        planes: Sequence[Plane],
        readiness: Readiness,
        ready_line: str,
        terminal: Terminal,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keepers = [Keeper(plane, terminal, clock) for plane in planes]
        self._readiness = readiness
        self._ready_line = ready_line
        self._terminal = terminal
        self._stop = asyncio.Event()
        self._reason = ""
        """The signal that set `_stop`."""

    async def run(self) -> int:
        """Returns 0 after a signal, 1 when a plane ended for good or had to be killed.

        The last line that is printed says why.
        """
        loop = asyncio.get_running_loop()
        for number in stop_signals():
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            for keeper in self._keepers:
                await keeper.start()
            ended = await self._first_end()
            if ended is not None:
                self._terminal.error(f"{ended.describe_exit()}; stopping")
        finally:
            for keeper in reversed(self._keepers):
                await keeper.stop()
        failed = [keeper for keeper in self._keepers if keeper.exit_code != 0]
        if ended is not None and not (self._stop.is_set() and not failed):
            self._terminal.error(ended.describe_end())
            return 1
        self._terminal.message(f"stopped: {self._reason}")
        return 1 if any(keeper.was_killed for keeper in self._keepers) else 0

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stop.is_set():
            for keeper in self._keepers:
                keeper.kill()
            return
        self._reason = number.name
        self._stop.set()

    async def _first_end(self) -> Keeper | None:
        """The first plane that ends for good by itself, or None when a signal arrived."""
        announcing = asyncio.create_task(self._announce())
        stopping = asyncio.create_task(self._stop.wait())
        ends = {asyncio.create_task(keeper.ended()): keeper for keeper in self._keepers}
        tasks: set[asyncio.Task[Any]] = {stopping, announcing, *ends}
        try:
            while True:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if stopping in done:
                    return None
                for task, keeper in ends.items():
                    if task in done:
                        task.result()
                        return keeper
                announcing.result()
                tasks.discard(announcing)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    async def _announce(self) -> None:
        await self._readiness.serving()
        for keeper in self._keepers:
            keeper.note_serving()  # or a kill right behind the line would find one that never did
        self._terminal.message(self._ready_line)
        for keeper in self._keepers:
            restarting = keeper.plane.restarting
            if restarting is not None:
                self._terminal.message(
                    f"the {keeper.plane.name} is process {keeper.pid}; when it dies it is "
                    f"started again, and {restarting.promise}"
                )
