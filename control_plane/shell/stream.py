"""One sequence's way from its replica to its client.

Both ends live on one event loop. The fleet pushes and never waits; the client takes everything
that has gathered when its turn comes, so under load messages grow instead of queues, and no timer
is needed. What gathers is bounded by the request's own token limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from control_plane.core.account import Account
from control_plane.core.ends import End
from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.core.request import Origin, Request, StopScanner
from control_plane.core.tokens import Tokens

_RECENT_CHUNKS = 64
"""Chunks that gather before they are joined, so that an unread token costs no object of its own."""


Seams = Sequence[tuple[int, Origin]]
"""Each says from which token on, by its index, an origin holds."""


class TextSink(Protocol):
    """One sequence's text: tokens go in, text comes out. control_plane.text has one."""

    @property
    def searches(self) -> bool:
        """Whether it looks for stop strings: then the core shows it all tokens as they arrive."""
        ...

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        ...

    def push(self, token_ids: list[int]) -> int | None:
        """Adds tokens. Returns how many of them count, as core.request.StopScanner says."""
        ...

    def finish(self) -> None:
        """No token follows: what was held back belongs to the text."""
        ...

    def drain(self) -> str:
        """The text since the last drain."""
        ...


class Gate(Protocol):
    """Decides which of many streams may send next."""

    def ask(self, turn: asyncio.Future[None]) -> None:
        """Resolves `turn` when it is its turn."""
        ...


class OpenGate:
    """A gate that makes nobody wait."""

    def ask(self, turn: asyncio.Future[None]) -> None:
        """Resolves `turn` in the loop's next tick."""
        turn.get_loop().call_soon(_resolve, turn)


@dataclass(slots=True)
class Delta:
    """What a client gets at once: the end too, if this was it.

    `stop_string` is set with the end that a stop string has brought. A value, and not frozen only
    for what that costs: every row of every step may make one.
    """

    text: str
    tokens: Tokens
    finish: Finish | None = None
    stop_string: str | None = None
    origin: Origin | None = None
    """That of its first token, where it is new."""
    seams: Seams = ()
    """Where it changes among the tokens that have gathered."""


class TokenStream:
    """Gathers one sequence's tokens until its client takes them, and turns them into text.

    A sink that searches gets its tokens from the core, before the next step is planned; any other
    gets them when the client takes them. Without a sink there is no text. `gate` is shared by all
    streams of a loop; without one, a stream waits for no other. `origin` is that of the tokens that
    the client has already, if it told.
    """

    def __init__(
        self,
        sink: TextSink | None = None,
        gate: Gate | None = None,
        origin: Origin | None = None,
    ) -> None:
        self._sink = sink
        self._gate = gate or OpenGate()
        self.scanner: StopScanner | None = sink if sink is not None and sink.searches else None
        """What the core must show this sequence's tokens to."""
        self._older: list[Tokens] = []
        self._recent: list[Tokens] = []
        self._origin = self._first_origin = self._told_origin = origin
        """Of the last token that was pushed, of the first that was not taken, and of the last that
        was."""
        self._seams: list[tuple[int, Origin]] = []
        self._finish: Finish | None = None
        self._error: Exception | None = None
        self.account: Account | None = None
        """What the sequence has cost; the engine sets it with the end."""
        self._turn: asyncio.Future[None] | None = None
        """What the client waits for while nothing is ready."""

    @property
    def ended(self) -> bool:
        """Whether the engine is done with the sequence. What gathered may not be taken yet."""
        return self._finish is not None or self._error is not None

    def made_with(self, origin: Origin) -> None:
        """Says what the tokens that are pushed from now on are made with."""
        origin = origin if self._origin is None else self._origin.followed_by(origin)
        if not (self._recent or self._older):
            self._first_origin = origin
        elif origin != self._origin:
            count = sum(len(tokens) for tokens in (*self._older, *self._recent))
            self._seams.append((count, origin))
        self._origin = origin

    def push(self, tokens: Tokens, finish: Finish | None) -> None:
        """Adds tokens, and the end if this is it."""
        assert self._finish is None and self._error is None, "pushed after the end"
        if tokens.ids:
            self._recent.append(tokens)
            if len(self._recent) == _RECENT_CHUNKS:
                self._older.append(Tokens.joined(self._recent))
                self._recent.clear()
        self._finish = finish
        self._wake()

    def end_at_once(self, request: Request, end: End, now: float) -> None:
        """Ends it where it begins: what the request resumes from has reached its end."""
        usage = Usage(len(request.prompt_token_ids), 0, end.count)
        changed = self._origin is not None and self._origin.arithmetic_changed
        spans = () if request.resumed is None else request.resumed.made_by()
        finish = Finish(
            end.reason, usage, end.stop_token_id, arithmetic_changed=changed, spans=spans
        )
        self.account = Account(end.reason, usage, 0.0, None, now - request.arrival)
        self.push(Tokens([]), finish)

    def fail(self, error: Exception) -> None:
        """Ends the sequence with an error, which `take` raises once the tokens before it are taken.

        Does nothing after an end.
        """
        if not self.ended:
            self._error = error
            self._wake()

    async def take(self) -> Delta:
        """All that is ready once something is and it is this stream's turn.

        For one client at a time. After a finish there is nothing more. Raises what `fail` was
        given.
        """
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._recent or self._older or self.ended:
            self._gate.ask(turn)
        else:
            self._turn = turn
        try:
            await turn
        finally:
            self._turn = None
        tokens = self._gathered()
        origin: Origin | None = None
        seams = tuple(self._seams)
        if self._origin is not self._told_origin:
            origin = None if self._first_origin == self._told_origin else self._first_origin
            self._first_origin = self._told_origin = self._origin
            self._seams = []
        if self._error is not None and not tokens.ids:
            raise self._error
        sink, finish = self._sink, self._finish
        if sink is None:
            return Delta("", tokens, finish, origin=origin, seams=seams)
        if self.scanner is None and tokens.ids:
            sink.push(tokens.ids)
        if finish is None:
            return Delta(sink.drain(), tokens, origin=origin, seams=seams)
        sink.finish()
        if sink.stop_string is not None and finish.reason is FinishReason.LENGTH:
            # It has come about with the end: by U+FFFD for a character that stays incomplete.
            finish = replace(finish, reason=FinishReason.STOP)
        return Delta(sink.drain(), tokens, finish, sink.stop_string, origin, seams)

    def _gathered(self) -> Tokens:
        """All tokens since the last time."""
        if len(self._recent) == 1 and not self._older:
            return self._recent.pop()
        tokens = Tokens.joined([*self._older, *self._recent])
        self._older.clear()
        self._recent.clear()
        return tokens

    def _wake(self) -> None:
        if self._turn is not None:
            self._gate.ask(self._turn)
            self._turn = None


def _resolve(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
