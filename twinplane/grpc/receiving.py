"""How the messages of calls are received: a few at once, and none for long while others wait.

A message is received whole before its first byte can be looked at, so each that is under way may
take as much memory as the largest one. A call that waits for its turn holds what the window of its
stream lets in, and no more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from twinplane.grpc.messages import NoMessage

# Far longer than what ends a call takes to reach its task.
_ENDING_SECONDS = 0.1

_Context = grpc.aio.ServicerContext[Any, Any]


class Receiver:
    """Receives the one message of each call whose request is no stream; for one event loop.

    At most `per_connection` messages of one connection and `in_all` of all are under way; others
    wait. A message may take `patience` seconds to arrive, and only `contended` when another waits
    because of `in_all`: so nobody keeps other connections out by sending nothing. Connections over
    Unix sockets have no names, and share `in_all` alone.
    """

    def __init__(
        self,
        *,
        per_connection: int = 8,
        in_all: int = 64,
        patience: float = 30.0,
        contended: float = 1.0,
    ) -> None:
        self._per_connection = per_connection
        self._patience = patience
        self._contended = contended
        self._places = asyncio.Semaphore(in_all)
        self._peers: dict[str, _Peer] = {}
        self._unhurried: dict[asyncio.Timeout, float] = {}
        """Messages under way that have their full patience, and since when; the oldest first."""

    async def receive(self, context: _Context) -> bytes:
        """The bytes of a call's message. Raises NoMessage."""
        peer = context.peer()
        if peer.startswith("unix"):
            message = await self._read_in_place(context)
        else:
            async with self._turn(peer):
                message = await self._read_in_place(context)
        if isinstance(message, bytes):
            return message
        # Most often the client has gone, or its message is larger than the library takes: it ends
        # the call then, and cancels this task.
        await asyncio.sleep(_ENDING_SECONDS)
        raise NoMessage("the call has no message")

    async def _read_in_place(self, context: _Context) -> Any:
        if self._places.locked():
            self._hurry_oldest()
        async with self._places:
            return await self._read(context)

    async def _read(self, context: _Context) -> Any:
        try:
            async with asyncio.timeout(self._patience) as timeout:
                self._unhurried[timeout] = asyncio.get_running_loop().time()
                try:
                    return await context.read()
                finally:
                    self._unhurried.pop(timeout, None)
        except TimeoutError:
            raise NoMessage("the call's message did not arrive in time") from None

    def _hurry_oldest(self) -> None:
        """Somebody waits for the place of the message that has been under way for longest."""
        for timeout, since in self._unhurried.items():
            now = asyncio.get_running_loop().time()
            timeout.reschedule(max(now, since + self._contended))
            del self._unhurried[timeout]
            return

    @asynccontextmanager
    async def _turn(self, name: str) -> AsyncIterator[None]:
        """A turn among the calls of one connection."""
        peer = self._peers.get(name)
        if peer is None:
            peer = self._peers[name] = _Peer(asyncio.Semaphore(self._per_connection))
        peer.call_count += 1
        try:
            async with peer.turns:
                yield
        finally:
            peer.call_count -= 1
            if not peer.call_count:
                del self._peers[name]


class _Peer:
    """One connection's turns, and how many of its calls have or want one."""

    __slots__ = ("call_count", "turns")

    def __init__(self, turns: asyncio.Semaphore) -> None:
        self.turns = turns
        self.call_count = 0
