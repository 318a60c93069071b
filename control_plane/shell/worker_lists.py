"""Where the addresses of workers come from, besides settings: a file, and a name that resolves.

Each list is looked at again and again. A look that fails changes nothing: its workers stay.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from twinplane.settings.addresses import parse_named, parse_replicas

T = TypeVar("T")

MAX_REPLICAS = 1024
_MAX_BYTES = 1024 * 1024
_SETTLE_SECONDS = 0.1
"""Between two looks at a file that has changed: whoever writes it may not have finished."""

Resolver = Callable[[str, int], Sequence[str]]
"""The addresses of a host, as numbers; may block. Raises OSError."""


class ListUnusable(Exception):
    """A list can't be read now, or names no worker, or something that is none."""


class WorkerList(Protocol):
    """A list of the replicas that should be there. `name` says to people which list it is."""

    @property
    def name(self) -> str: ...

    async def read(self) -> tuple[str, ...]:
        """The replicas as `--worker` takes them, at least one. Raises ListUnusable."""
        ...


class ListedInFile:
    """A file with a replica on each line. What follows a `#` is a comment."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last: str | None = None

    @property
    def name(self) -> str:
        """The path."""
        return str(self._path)

    async def read(self) -> tuple[str, ...]:
        """See WorkerList. What was not there at the last look counts once it stays as it is."""
        text = await _aside(self._text)
        while text != self._last:
            self._last = text
            await asyncio.sleep(_SETTLE_SECONDS)
            text = await _aside(self._text)
        lines = [line.partition("#")[0].strip() for line in text.splitlines()]
        return _checked([line for line in lines if line])

    def _text(self) -> str:
        try:
            with self._path.open("rb") as file:
                content = file.read(_MAX_BYTES + 1)
        except OSError as error:
            raise ListUnusable(f"can't be read: {error.strerror}") from error
        if len(content) > _MAX_BYTES:
            raise ListUnusable(f"has more than {_MAX_BYTES} bytes")
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise ListUnusable("is no UTF-8 text") from error


def resolve_host(host: str, port: int) -> list[str]:
    """The addresses that the system knows for a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for _, _, _, _, address in found]


class ListedInDns:
    """A name that resolves to the addresses of workers; all listen on the same port.

    `given` is host:port.
    """

    def __init__(self, given: str, resolver: Resolver = resolve_host) -> None:
        self._given = given
        self._resolver = resolver

    @property
    def name(self) -> str:
        """Host and port."""
        return self._given

    async def read(self) -> tuple[str, ...]:
        """See WorkerList."""
        host, port = parse_named(self._given)

        def resolved() -> Sequence[str]:
            try:
                return self._resolver(host, port)
            except (OSError, UnicodeError) as error:
                raise ListUnusable(f"does not resolve: {error}") from error

        found = sorted(set(await _aside(resolved)))
        return _checked([f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in found])


def _checked(replicas: Sequence[str]) -> tuple[str, ...]:
    """Raises ListUnusable."""
    if not replicas:
        raise ListUnusable("names no worker")
    if len(replicas) > MAX_REPLICAS:
        raise ListUnusable(f"names {len(replicas)} replicas; the maximum is {MAX_REPLICAS}")
    for replica in replicas:
        if len(replica.split()) > 1:
            raise ListUnusable(f"has more than one replica on a line: {replica!r}")
    try:
        return parse_replicas(replicas)
    except ValueError as error:
        raise ListUnusable(str(error)) from error


async def _aside(call: Callable[[], T]) -> T:
    """What a call that may block returns or raises.

    On a thread of its own: a name server or a file system that does not answer never keeps the
    process from ending.
    """
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(how: Callable[[Any], None], what: T | Exception) -> None:
        if not outcome.done():
            how(what)

    def run() -> None:
        how: Callable[[Any], None] = outcome.set_result
        what: T | Exception
        try:
            what = call()
        except Exception as error:  # raised again where it is awaited
            how, what = outcome.set_exception, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, how, what)

    threading.Thread(target=run, name="worker list", daemon=True).start()
    return await outcome
