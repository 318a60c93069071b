"""An event loop whose time jumps to the next timer instead of waiting for it.

Runs are deterministic and take no wall time. A loop with nothing to wait for is a deadlock, and
says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(BaseException):
    """Every task waits and no timer is set."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time()` starts at 0 and moves only when everything waits."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._real_select = self._selector.select
        self._selector.select = self._select
        self.failures: list[str] = []
        """What timers and other callbacks raised: asyncio only logs it."""
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        return self._now

    def timer_count(self) -> int:
        """How many timers are set."""
        return sum(not timer.cancelled() for timer in self._scheduled)

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        loop.default_exception_handler(context)
        if "handle" in context:
            self.failures.append(repr(context))

    def _select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise Deadlock("every task waits and no timer is set")
        if timeout > 0:
            self._now += timeout
        return self._real_select(0)


def run_virtual(main: Callable[[VirtualLoop], Coroutine[Any, Any, T]]) -> T:
    """Runs `main(loop)` in virtual time. No callback may raise meanwhile."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        outcome = runner.run(main(loop))
        assert not loop.failures
        return outcome
