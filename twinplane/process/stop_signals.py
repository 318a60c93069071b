"""When the process should stop: a signal, or the end of its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from types import TracebackType
from typing import Protocol

from twinplane.process.starting import stop_signals

_STDIN = 0
_PARENT_ENDED = "the parent ends"


class StopEvents(Protocol):
    """Events that say when to stop: `first` to finish what runs, `second` not to wait for it."""

    @property
    def first(self) -> asyncio.Event: ...

    @property
    def second(self) -> asyncio.Event: ...


class StopSignals:
    """While entered, a SIGINT, SIGTERM or SIGHUP sets `first`, and another one `second`.

    With `watch_stdin` the end of standard input sets `first` too: a parent that holds the other end
    takes this process with it, however it dies. For `second` it does not count: a supervisor closes
    the input of a process that the same signal may reach as well. Made on the running event loop.
    """

    def __init__(self, *, watch_stdin: bool) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.reason = ""
        """What set `first`: the signal's name, or the parent's end."""
        self.hurried_by: signal.Signals | None = None
        """What set `second`."""
        self._signal_count = 0
        self._loop = asyncio.get_running_loop()
        self._watch_stdin = watch_stdin
        self._signals = stop_signals()

    def __enter__(self) -> StopSignals:
        for number in self._signals:
            self._loop.add_signal_handler(number, self._on_signal, number)
        if self._watch_stdin:
            # A thread, because no event loop can wait for every kind of standard input.
            threading.Thread(target=self._wait_for_parent, name="parent", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number in self._signals:
            self._loop.remove_signal_handler(number)

    def _on_signal(self, number: signal.Signals) -> None:
        self._signal_count += 1
        if self._signal_count == 1:
            self._stop(number.name)
        elif not self.second.is_set():
            self.hurried_by = number
            self.second.set()

    def _stop(self, reason: str) -> None:
        if not self.first.is_set():
            self.reason = reason
            self.first.set()

    def _wait_for_parent(self) -> None:
        try:
            while os.read(_STDIN, 4096):
                pass
        except OSError:
            pass  # closed: nobody holds the other end
        try:
            self._loop.call_soon_threadsafe(self._stop, _PARENT_ENDED)
        except RuntimeError:
            assert self._loop.is_closed()  # the process is stopping already
