"""Logs on stderr: a constant message, and fields beside it. Never a prompt, a token or a secret.

Code logs as `logger.info("worker attached", extra=fields(epoch=...))`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

Field = str | int | float | bool | None

_ATTRIBUTE = "fields"


def fields(**values: Field) -> dict[str, dict[str, Field]]:
    """The `extra` of a log call: worker_id, epoch, step_id and the like."""
    return {_ATTRIBUTE: values}


def configure(level: str, log_format: str, stream: TextIO | None = None) -> None:
    """Makes the root logger write to `stream` (stderr) alone.

    `log_format` is json, text, or auto: text on a terminal, else JSON.
    """
    stream = sys.stderr if stream is None else stream
    text = log_format == "text" or (log_format == "auto" and stream.isatty())
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
            **_fields_of(record),
        }
        if record.exc_info is not None:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """time level message key=value …"""

    def format(self, record: logging.LogRecord) -> str:
        time = _time(record).astimezone().strftime("%H:%M:%S.%f")[:-3]
        parts = [time, f"{record.levelname.lower():7}", record.getMessage()]
        parts += [f"{key}={value}" for key, value in _fields_of(record).items()]
        line = " ".join(parts)
        if record.exc_info is not None:
            line += "\n" + self.formatException(record.exc_info)
        return line


def _time(record: logging.LogRecord) -> datetime:
    return datetime.fromtimestamp(record.created, UTC)


def _fields_of(record: logging.LogRecord) -> dict[str, Field]:
    values: dict[str, Field] = getattr(record, _ATTRIBUTE, {})
    return values
