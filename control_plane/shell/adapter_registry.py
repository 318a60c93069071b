"""The adapters that a fleet serves: what clients call them, what they are, and where they come
from. A new adapter under an old name is a new adapter; requests in flight keep theirs.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from control_plane.core.request import Adapter
from control_plane.shell.adapter_files import AdapterFiles, AdapterUnreadable, read_adapter_files
from twinplane.process.logs import fields

_logger = logging.getLogger(__name__)

MOST_ADAPTERS = 16_384
_MOST_RETIRED = 1024
"""Adapters that no name leads to any more, and that requests may still need; the newest stay."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/\-]{0,127}\Z")


class AdapterRefused(Exception):
    """An adapter can't be registered; says why."""


class AdapterUnknown(Exception):
    """No adapter of this name is registered."""


@dataclass(frozen=True, slots=True)
class RegisteredAdapter:
    """An adapter that clients may name. One that `is_pinned` stays where it was loaded, as long as
    other slots can be given away."""

    adapter: Adapter
    files: AdapterFiles
    is_pinned: bool = False


class AdapterRegistry:
    """Everything but registering folders returns at once and runs on the fleet's loop.

    `read` makes an adapter of a folder, on a thread of its own.
    """

    def __init__(self, read: Callable[[str], AdapterFiles] = read_adapter_files) -> None:
        self._read = read
        self._by_name: dict[str, RegisteredAdapter] = {}
        self._retired: dict[str, AdapterFiles] = {}
        self._files: dict[str, AdapterFiles] = {}
        self.pinned: frozenset[str] = frozenset()
        """Digests."""

    @property
    def count(self) -> int:
        """How many have a name."""
        return len(self._by_name)

    async def register(
        self, name: str, folder: str, *, is_pinned: bool = False
    ) -> RegisteredAdapter:
        """Makes a folder's adapter known by a name, in place of what had that name before.

        Raises AdapterRefused; nothing has changed then.
        """
        try:
            files = await asyncio.to_thread(self._read, folder)
        except AdapterUnreadable as error:
            raise AdapterRefused(str(error)) from error
        return self.add(name, files, is_pinned=is_pinned)

    async def register_all(self, adapters: Iterable[tuple[str, str]]) -> str | None:
        """Registers folders by name, in order. Returns why one can't be; None: all are."""
        for name, folder in adapters:
            try:
                added = await self.register(name, folder)
            except AdapterRefused as error:
                return f"can't serve the adapter {name!r}: {error}"
            digest = added.adapter.digest[:12]
            _logger.info("adapter registered", extra=fields(adapter=name, adapter_digest=digest))
        return None

    def add(self, name: str, files: AdapterFiles, *, is_pinned: bool = False) -> RegisteredAdapter:
        """The same for a folder that was read. Raises AdapterRefused."""
        if not _NAME.match(name):
            raise AdapterRefused(
                f"{name!r} is no name of an adapter: letters, digits and . _ - / are, up to 128"
            )
        if name not in self._by_name and len(self._by_name) >= MOST_ADAPTERS:
            raise AdapterRefused(f"{MOST_ADAPTERS} adapters are registered, which is the most")
        added = RegisteredAdapter(Adapter(name, files.digest), files, is_pinned)
        before, self._by_name[name] = self._by_name.get(name), added
        self._changed(before)
        return added

    def unregister(self, name: str) -> None:
        """Forgets a name. Requests in flight go on. Raises AdapterUnknown."""
        before = self.named(name)
        del self._by_name[name]
        self._changed(before)

    def pin(self, name: str, *, is_pinned: bool = True) -> None:
        """See RegisteredAdapter. Raises AdapterUnknown."""
        self._by_name[name] = replace(self.named(name), is_pinned=is_pinned)
        self._changed(None)

    def named(self, name: str) -> RegisteredAdapter:
        """What the name means now. Raises AdapterUnknown."""
        found = self._by_name.get(name)
        if found is None:
            raise AdapterUnknown(name)
        return found

    def adapters(self) -> list[RegisteredAdapter]:
        """All of them, by their names."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def names(self, most: int) -> list[str]:
        """The first of their names."""
        return sorted(self._by_name)[:most]

    def files(self, digest: str) -> AdapterFiles | None:
        """Where an adapter comes from, also one that has no name any more."""
        return self._files.get(digest) or self._retired.get(digest)

    def _changed(self, before: RegisteredAdapter | None) -> None:
        self._files = {own.adapter.digest: own.files for own in self._by_name.values()}
        if before is not None:
            self._retired.pop(before.adapter.digest, None)
            self._retired[before.adapter.digest] = before.files
            if len(self._retired) > _MOST_RETIRED:
                del self._retired[next(iter(self._retired))]
        self.pinned = frozenset(
            own.adapter.digest for own in self._by_name.values() if own.is_pinned
        )
