"""Who may send next, when many streams have something to send.

A step brings tokens to hundreds of streams at once, and sending them costs far more than the step.
Were all woken together, the loop would send to every one of them before it looks at the worker
again, which would wait for its next plan all that time. So turns are given in bursts, in the order
they were asked for, with rounds of the loop between them in which it does everything else. Tokens
that come before a stream's turn leave with those that wait already. When there is time, every
stream has its turn after every step; no timer is involved.

The rest after a burst is as long as gRPC needs: its asyncio layer tells the loop of each finished
write by one byte through a pair of sockets, of which the loop reads one a round. Written faster
than read, they fill up at a few hundred, and then what the worker sent stays behind them too.
"""

from __future__ import annotations

import asyncio
from collections import deque

BURST = 16
"""Turns in one round: few enough to take well under a millisecond."""


class Turns:
    """Grants turns on one event loop, first come, first served."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_going_round = False
        self._rest = 0
        """Rounds to go before the next burst."""

    def ask(self, turn: asyncio.Future[None]) -> None:
        """Resolves `turn` when it is its turn; one that is cancelled costs nobody else theirs."""
        self._waiting.append(turn)
        if not self._is_going_round:
            self._is_going_round = True
            loop = turn.get_loop()
            loop.call_soon(self._go_round, loop)

    def _go_round(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._rest:
            self._rest -= 1
        else:
            granted = self._grant()
            # A few rounds more than writes: other calls have their bytes as well.
            self._rest = granted + granted // 4
        self._is_going_round = self._rest > 0 or bool(self._waiting)
        if self._is_going_round:
            loop.call_soon(self._go_round, loop)

    def _grant(self) -> int:
        """Gives at most a burst of turns; returns how many."""
        granted = 0
        while self._waiting and granted < BURST:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                granted += 1
        return granted
