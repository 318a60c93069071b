"""Logs on stderr: a constant message, and fields beside it.

Code logs as `logger.info("worker attached", extra=fields(worker_id=...))`. Machines get JSON lines,
people get readable ones. Prompts, tokens and secrets never go into a field.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from enum import Enum
from typing import TextIO

Field = str | int | float | bool | None

_ATTRIBUTE = "fields"


class LogFormat(Enum):
    """How a log line looks. AUTO is text on a terminal, otherwise JSON."""

    AUTO = "auto"
    JSON = "json"
    TEXT = "text"


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """The `extra` of a log call: request_id, step_id, worker_id, weight_version and the like."""
    return {_ATTRIBUTE: values}


def configure(level: str, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Makes the root logger write to `stream` (stderr) alone. Called once, by the entry point."""
    stream = sys.stderr if stream is None else stream
    text = log_format is LogFormat.TEXT or (log_format is LogFormat.AUTO and stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(TextFormatter() if text else JsonFormatter())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())


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
