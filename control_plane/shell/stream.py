"""One request's way from the driver to its client.

Both ends live on one event loop. The driver pushes and never waits; the client takes everything
that has gathered when its turn comes, so under load messages grow instead of queues, and no timer
is needed. What gathers is bounded by the request's own token limit.
"""

from __future__ import annotations

import asyncio

from control_plane.core.events import Finish
from control_plane.shell.turns import Turns


class TokenStream:
    """Gathers one request's tokens until its client takes them.

    `turns` are those of all streams that share a loop; without, it waits for no other.
    """

    def __init__(self, turns: Turns | None = None) -> None:
        self._turns = turns or Turns()
        self._tokens: list[int] = []
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self._turn: asyncio.Future[None] | None = None
        """What the client waits for while nothing is ready."""

    @property
    def ended(self) -> bool:
        """Whether the driver is done with the request. What gathered may not be taken yet."""
        return self._finish is not None or self._error is not None

    def push(self, token_ids: list[int], finish: Finish | None) -> None:
        """Adds tokens, and the end if this is it."""
        assert not self.ended, "pushed after the end"
        self._tokens.extend(token_ids)
        self._finish = finish
        if token_ids or finish is not None:
            self._wake()

    def fail(self, error: Exception) -> None:
        """Ends the request with an error, which `take` raises once the tokens before it are taken.

        Does nothing after an end.
        """
        if not self.ended:
            self._error = error
            self._wake()

    async def take(self) -> tuple[list[int], Finish | None]:
        """All that is ready once something is and it is this stream's turn.

        For one client at a time. After a finish there is nothing more.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._tokens or self.ended:
            self._turns.ask(turn)
        else:
            self._turn = turn
        try:
            await turn
        finally:
            self._turn = None
        tokens, self._tokens = self._tokens, []
        if self._error is not None and not tokens:
            raise self._error
        return tokens, self._finish

    def _wake(self) -> None:
        if self._turn is not None:
            self._turns.ask(self._turn)
            self._turn = None
