"""Writes lines to a file descriptor without making anybody wait for its reader.

A pipe whose reader stops and a terminal that is paused block whoever writes to them, a full disk
fails. A server must not stop for that: lines wait for a bounded time in a bounded queue, and those
beyond it are dropped, counted, and told of as soon as lines can be written again.
"""

from __future__ import annotations

import io
import os
import select
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

_MAX_WAITING_BYTES = 1 << 17
_FILE_BATCH_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Line:
    """Bytes to write, and how many records are lost without them: several for a line that tells
    of others that were dropped."""

    data: bytes
    record_count: int
    tells_of_loss: bool


class LineWriter:
    """Writes lines to `descriptor`, those that have to wait by a thread. Thread-safe.

    A line that can be written without waiting is written at once. Others wait, at most
    `max_waiting_bytes` of them, and are written in order. `tell_of_loss` makes the line that says
    how many were dropped. The thread doesn't keep the process alive: whoever ends it calls `flush`
    first.
    """

    def __init__(
        self,
        descriptor: int,
        tell_of_loss: Callable[[int], bytes],
        *,
        max_waiting_bytes: int = _MAX_WAITING_BYTES,
    ) -> None:
        self.descriptor = descriptor
        self._tell_of_loss = tell_of_loss
        self._max_waiting_bytes = max_waiting_bytes
        self._never_blocks = not os.get_blocking(descriptor)
        is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._batch_bytes = _FILE_BATCH_BYTES if is_file else select.PIPE_BUF
        # Reentrant: a destructor that logs may run while this thread is in `put`.
        self._changed = threading.Condition()
        self._waiting: deque[_Line] = deque()
        """Includes the batch that the thread is writing, until that is done."""
        self._waiting_bytes = 0
        self._untold_count = 0
        self._dropped_count = 0
        self._is_torn = False
        """Whether the last line that was written is without its end."""
        threading.Thread(target=self._run, name="log", daemon=True).start()

    @property
    def dropped_count(self) -> int:
        """Lines that were dropped so far."""
        return self._dropped_count

    @property
    def has_room(self) -> bool:
        """Whether the queue is at most half full."""
        return self._waiting_bytes <= self._max_waiting_bytes // 2

    def put(self, data: bytes) -> None:
        """Writes `data`, which ends with a line end, soon; drops it when the queue is full."""
        with self._changed:
            if self._waiting and self._waiting_bytes + len(data) > self._max_waiting_bytes:
                self._lose(1)
                return
            self._add_loss()
            self._add(_Line(data, 1, False))

    def drop(self) -> bool:
        """True, and one more line counted as dropped, when the queue is full: the caller need not
        make a line."""
        with self._changed:
            if self._waiting_bytes < self._max_waiting_bytes:
                return False
            self._lose(1)
            return True

    def flush(self, seconds: float) -> bool:
        """Waits until everything is written, at most `seconds`. Returns whether it is."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while self._waiting:
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(left)
        return True

    def _add(self, line: _Line) -> None:
        self._waiting.append(line)
        self._waiting_bytes += len(line.data)
        if self._never_blocks and len(self._waiting) == 1:
            written, error = self._write_now(line.data)
            if error is None or not isinstance(error, BlockingIOError):
                self._finish([line], written, failed=error is not None)
                return
            self._waiting[0] = _Line(line.data[written:], line.record_count, line.tells_of_loss)
            self._waiting_bytes -= written
        self._changed.notify_all()

    def _add_loss(self) -> None:
        """Queues the line that tells of what was dropped since the last such line."""
        if self._untold_count:
            count, self._untold_count = self._untold_count, 0
            self._add(_Line(self._tell_of_loss(count), count, True))

    def _lose(self, count: int) -> None:
        self._dropped_count += count
        self._untold_count += count

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                batch = self._batch()
            data = b"".join(line.data for line in batch)
            written, failed = self._write(data)
            with self._changed:
                self._finish(batch, written, failed=failed)

    def _batch(self) -> list[_Line]:
        """The first lines. Together they are short enough to be written in one piece, so that
        others who write to the same pipe don't come between."""
        batch, size = [self._waiting[0]], len(self._waiting[0].data)
        for line in islice(self._waiting, 1, None):
            size += len(line.data)
            if size > self._batch_bytes:
                break
            batch.append(line)
        return batch

    def _finish(self, batch: list[_Line], written: int, *, failed: bool) -> None:
        """Takes a batch out of the queue, of which so many bytes could be written."""
        end = 0
        for line in batch:
            self._waiting.popleft()
            self._waiting_bytes -= len(line.data)
            end += len(line.data)
            if end > written and line.tells_of_loss:
                self._untold_count += line.record_count
            elif end > written:
                self._lose(line.record_count)
        if not failed and not self._waiting:
            self._add_loss()
        self._changed.notify_all()

    def _write(self, data: bytes) -> tuple[int, bool]:
        """Writes however long that takes. Returns how many bytes, and whether the rest failed."""
        done = 0
        while done < len(data):
            written, error = self._write_now(data[done:])
            done += written
            if isinstance(error, BlockingIOError):
                poll = select.poll()
                poll.register(self.descriptor, select.POLLOUT)
                poll.poll()
            elif error is not None:  # a full disk, or a reader that is gone
                return done, True
        return done, False

    def _write_now(self, data: bytes) -> tuple[int, OSError | None]:
        """Writes what the descriptor takes. Returns how much of `data` that is, and the error.

        After a line that was cut short it begins a new one.
        """
        done = 0
        try:
            if self._is_torn and data:
                os.write(self.descriptor, b"\n")
                self._is_torn = False
            while done < len(data):
                done += os.write(self.descriptor, memoryview(data)[done:])
        except BlockingIOError as error:
            return done, error
        except OSError as error:
            if done:
                self._is_torn = data[done - 1 : done] != b"\n"
            return done, error
        return done, None


class _Sink(io.RawIOBase):
    """The binary end of a text stream before a LineWriter."""

    def __init__(self, writer: LineWriter, *, isatty: bool) -> None:
        super().__init__()
        self._writer = writer
        self._isatty = isatty

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._isatty

    def fileno(self) -> int:
        return self._writer.descriptor

    def write(self, data: ReadableBuffer, /) -> int:
        copy = bytes(data)
        self._writer.put(copy)
        return len(copy)


def text_stream(writer: LineWriter, encoding: str, *, isatty: bool) -> io.TextIOWrapper:
    """A text stream whose lines go to `writer`. Neither writing nor flushing it ever waits."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Sink(writer, isatty=isatty)),
        encoding=encoding,
        errors="backslashreplace",
        line_buffering=True,
    )


def make_nonblocking(descriptor: int) -> None:
    """Makes writes of native code to a pipe or terminal fail where they would block.

    The flag belongs to the open file description, which others share: a shell, the other plane. So
    the file is opened once more for this process, where that is possible.
    """
    with suppress(OSError):
        is_pipe = stat.S_ISFIFO(os.fstat(descriptor).st_mode)
        if not is_pipe and not os.isatty(descriptor):
            return
        own = os.open(f"/proc/self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        os.dup2(own, descriptor)
        os.close(own)
