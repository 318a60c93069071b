"""Logs on stderr: a constant message, and fields beside it.

Code logs as `logger.info("worker attached", extra=fields(worker_id=...))`. Machines get JSON lines,
people get readable ones. Prompts, tokens and secrets never go into a field.

No log line makes anybody wait: where the reader of stderr stops or the disk is full, lines are
dropped and counted (see `line_writer`).
"""

from __future__ import annotations

import io
import json
import logging
import sys
import time
from datetime import UTC, datetime
from enum import Enum
from typing import TextIO

from twinplane.process.line_writer import LineWriter, make_nonblocking, text_stream

Field = str | int | float | bool | None

_ATTRIBUTE = "fields"
_OURS = ("twinplane", "control_plane", "worker_service")
_LAST_LINES_SECONDS = 1.0
"""How long the end of a process waits for its last lines to be written."""


class LogFormat(Enum):
    """How a log line looks. AUTO is text on a terminal, otherwise JSON."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """The `extra` of a log call: request_id, step_id, worker_id, weight_version and the like."""
    return {_ATTRIBUTE: values}


def configure(level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Makes the root logger write to `stream` (stderr) alone. Called once, by the entry point.

    `level` is that of our own lines. Libraries only warn, whatever it is: what they say below that
    is for those who work on them.
    What else this process writes to sys.stderr then goes the same way: tracebacks and warnings must
    not wait for a reader either.
    """
    is_stderr = stream is None
    stream = sys.stderr if stream is None else stream
    text = log_format is LogFormat.TEXT or (log_format is LogFormat.AUTO and stream.isatty())
    formatter = TextFormatter() if text else JsonFormatter()
    descriptor = _descriptor(stream)
    handler: logging.Handler
    if descriptor is None:  # in memory, where nothing can block
        handler = logging.StreamHandler(stream)
    else:
        encoding = stream.encoding if text else "utf-8"
        if is_stderr:
            make_nonblocking(descriptor)
        writer = LineWriter(descriptor, lambda count: _loss(formatter, encoding, count))
        handler = LineHandler(writer, encoding)
        if is_stderr:
            sys.stderr = text_stream(writer, encoding, isatty=stream.isatty())
    handler.setFormatter(formatter)
    root = logging.getLogger()
    root.handlers = [handler]
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, logging.WARNING))
    for package in _OURS:
        logging.getLogger(package).setLevel(number)


def dropped_record_count() -> int:
    """Log records that this process has dropped because they could not be written."""
    handlers = logging.getLogger().handlers
    return sum(handler.dropped_count for handler in handlers if isinstance(handler, LineHandler))


class LineHandler(logging.Handler):
    """Hands each record to a LineWriter as one line."""

    def __init__(self, writer: LineWriter, encoding: str) -> None:
        super().__init__()
        self._writer = writer
        self._encoding = encoding

    @property
    def dropped_count(self) -> int:
        """Records and lines that were dropped so far."""
        return self._writer.dropped_count

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if not self._writer.drop():
                self._writer.put(_encoded(self.format(record), self._encoding))
        except Exception:  # as every handler of the standard library does
            self.handleError(record)

    def flush(self) -> None:
        """Waits a moment for what is queued. Called when the process ends."""
        self._writer.flush(_LAST_LINES_SECONDS)


def _descriptor(stream: TextIO) -> int | None:
    try:
        return stream.fileno()
    except (AttributeError, OSError, io.UnsupportedOperation):
        return None


def _encoded(line: str, encoding: str) -> bytes:
    return (line + "\n").encode(encoding, errors="backslashreplace")


def _loss(formatter: logging.Formatter, encoding: str, count: int) -> bytes:
    """The line that says that `count` lines before it are missing."""
    record = logging.makeLogRecord(
        {
            "name": __name__,
            "levelno": logging.WARNING,
            "levelname": "WARNING",
            "msg": "log records were dropped",
            "created": time.time(),
            **fields(count=count),
        }
    )
    return _encoded(formatter.format(record), encoding)


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time (RFC 3339, UTC), level, logger, message, then the fields."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Field] = {
            "time": _time(record).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= _fields_of(record)
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """time level message key=value …"""

    def format(self, record: logging.LogRecord) -> str:
        time = _time(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        parts = [time, f"{record.levelname.lower():7}", record.getMessage()]
        parts += [f"{key}={_plain(value)}" for key, value in _fields_of(record).items()]
        line = " ".join(parts)
        if record.exc_info is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _plain(value: Field) -> str:
    """The value as it is, in quotes and escaped when it could be misread."""
    text = str(value)
    return text if text.isprintable() and " " not in text else json.dumps(text)


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _fields_of(record: logging.LogRecord) -> dict[str, Field]:
    values: dict[str, Field] = getattr(record, _ATTRIBUTE, {})
    return values
