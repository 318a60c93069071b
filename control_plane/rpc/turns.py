"""Which stream may send next, when many have something to send.

A step brings tokens to hundreds of streams at once, and sending them costs far more than the step.
If all of them were woken together, the loop would send to every one before it looks at the worker
again, and the worker would wait for its next plan all that time. So turns are granted in bursts, in
the order they were asked for, with ticks of the loop between the bursts in which it does everything
else. Tokens that arrive before a stream's turn leave with those that wait already. While there is
time, every stream has its turn after every step; no timer is involved.

After a burst, Turns pauses for at least as many ticks as there were writes. grpc.aio reports each
completed write by one byte on a pair of sockets, and the loop reads one byte per tick. If we write
faster, the backlog grows to a few hundred bytes, and the worker's results wait behind it.
"""

from __future__ import annotations

import asyncio
from collections import deque

BURST = 16
"""Turns granted in one tick: few enough to take well under a millisecond."""


class Turns:
    """Grants turns on one event loop, first come, first served. Implements shell.stream.Gate."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_ticking = False
        self._pause = 0
        """Ticks to go before the next burst."""

    def ask(self, turn: asyncio.Future[None]) -> None:
        """Resolves `turn` when it is due. A turn that was cancelled is skipped."""
        self._waiting.append(turn)
        if not self._is_ticking:
            self._is_ticking = True
            loop = turn.get_loop()
            loop.call_soon(self._tick, loop)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._pause:
            self._pause -= 1
        else:
            granted = self._grant()
            # A few ticks more than writes, because other calls add bytes as well.
            self._pause = granted + granted // 4
        self._is_ticking = self._pause > 0 or bool(self._waiting)
        if self._is_ticking:
            loop.call_soon(self._tick, loop)

    def _grant(self) -> int:
        """Grants at most a burst of turns; returns how many."""
        granted = 0
        while self._waiting and granted < BURST:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                granted += 1
        return granted
