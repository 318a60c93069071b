"""When the process should stop: a signal, or the end of its parent."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Protocol

from twinplane.process.exit import exit_at_once
from twinplane.process.logs import fields

_STDIN = 0
_PARENT_ENDED = "the parent has ended"

_logger = logging.getLogger(__name__)


def stop_signals() -> tuple[signal.Signals, ...]:
    """The signals that ask a process to stop. A hangup is none under nohup, which ignores it."""
    signals = (signal.SIGINT, signal.SIGTERM)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return signals
    return (*signals, signal.SIGHUP)


def end_at_once_when_asked() -> None:
    """Until StopSignals takes over, a signal ends this process at once, well: nothing runs yet."""
    for number in stop_signals():
        signal.signal(number, _end_at_once)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    name = signal.Signals(number).name
    try:
        _logger.info("stopped", extra=fields(reason=f"{name} while it started"))
    finally:  # a signal may come in the middle of another line
        exit_at_once(0)


class StopEvents(Protocol):
    """Events that say when to stop: `first` to finish what runs, `second` not to wait for it."""

    @property
    def first(self) -> asyncio.Event: ...

    @property
    def second(self) -> asyncio.Event: ...


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP set `first`, and after that `second`.

    With `watch_stdin` the end of standard input sets `first` too: a parent that holds the other end
    takes this process with it, however it dies. It never sets `second`: a supervisor closes the
    input of a process that the same signal may have reached already. Made on the running event
    loop.
    """

    def __init__(self, *, watch_stdin: bool) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.reason = ""
        """What set `first`: the signal's name, or the parent's end."""
        self.hurried_by: signal.Signals | None = None
        """What set `second`."""
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
        if not self.first.is_set():
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
