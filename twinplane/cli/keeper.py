"""Keeps one plane running: starts it again when it dies, for as long as its policy allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from twinplane.cli.child import Child, Plane, Restarting
from twinplane.cli.restarts import Lives
from twinplane.cli.terminal import Terminal


class Keeper:
    """One plane and its lives. `clock` gives monotonic seconds."""

    def __init__(self, plane: Plane, terminal: Terminal, clock: Callable[[], float]) -> None:
        self.plane = plane
        self._terminal = terminal
        self._clock = clock
        self._child: Child | None = None
        self._served_since: float | None = None
        """When this life began to serve; None: it does not yet."""
        self._why_given_up = ""

    @property
    def pid(self) -> int:
        """The process of this life."""
        return self._started().pid

    @property
    def exit_code(self) -> int | None:
        """How the last life ended; None while it goes on, and before the first."""
        return None if self._child is None else self._child.exit_code

    @property
    def was_killed(self) -> bool:
        """Whether this command had to kill it."""
        return self._child is not None and self._child.was_killed

    async def start(self) -> None:
        """Begins the first life."""
        self._child = await Child.start(self.plane, self._terminal)

    async def ended(self) -> None:
        """Returns when the plane has ended for good."""
        restarting = self.plane.restarting
        if restarting is None:
            await self._started().wait()
            return
        lives = Lives(restarting.policy)
        while True:
            lives = lives.after(await self._live(restarting, is_first=not lives.has_served))
            if lives.are_over:
                self._why_given_up = lives.why_over()
                return
            self._terminal.error(
                f"{self.describe_exit()}; it is started again in {lives.delay:g} s, "
                "and streams wait"
            )
            await asyncio.sleep(lives.delay)
            await self.start()

    def note_serving(self) -> None:
        """It is known that this life serves. Does nothing when that was known."""
        if self._served_since is None:
            self._served_since = self._clock()

    async def stop(self) -> None:
        """Ends this life in order. Does nothing before the first."""
        if self._child is not None:
            await self._child.stop()

    def kill(self) -> None:
        """Ends this life at once."""
        if self._child is not None:
            self._child.kill()

    def describe_exit(self) -> str:
        """Says how the last life ended."""
        return self._started().describe_exit()

    def describe_end(self) -> str:
        """Says why the plane has ended for good."""
        failure = self._started().describe_failure()
        return f"{failure}; {self._why_given_up}" if self._why_given_up else failure

    async def _live(self, restarting: Restarting, *, is_first: bool) -> float | None:
        """Waits for the end of this life. Returns for how many seconds it served, None: never."""
        self._served_since = None
        noticing = asyncio.create_task(self._notice_serving(restarting, is_first=is_first))
        try:
            await self._started().wait()
        finally:
            noticing.cancel()
            await asyncio.wait((noticing,))
        if not noticing.cancelled():
            noticing.result()
        return None if self._served_since is None else self._clock() - self._served_since

    async def _notice_serving(self, restarting: Restarting, *, is_first: bool) -> None:
        await restarting.readiness.serving()
        self.note_serving()
        if not is_first:
            self._terminal.message(f"the {self.plane.name} is back: process {self.pid}")

    def _started(self) -> Child:
        assert self._child is not None
        return self._child
