"""When the process should stop: a signal, or the end of its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from types import TracebackType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_STDIN = 0


class StopSignals:
    """While entered, SIGINT and SIGTERM set `first`, and after that `second`.

    With `watch_stdin` the end of standard input counts as a signal: a parent that holds the other
    end takes this process with it, however it dies. Without `catch_second` a signal after `first`
    does what it does by default, and ends the process at once. Made on the running event loop.
    """

    def __init__(self, *, watch_stdin: bool, catch_second: bool = True) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._watch_stdin = watch_stdin
        self._catch_second = catch_second

    def __enter__(self) -> StopSignals:
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._stop)
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
        self._release()

    def _stop(self) -> None:
        if self.first.is_set():
            self.second.set()
            return
        self.first.set()
        if not self._catch_second:
            self._release()

    def _release(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)

    def _wait_for_parent(self) -> None:
        try:
            while os.read(_STDIN, 4096):
                pass
        except OSError:
            pass  # closed: nobody holds the other end
        try:
            self._loop.call_soon_threadsafe(self._stop)
        except RuntimeError:
            assert self._loop.is_closed()  # the process is stopping already
