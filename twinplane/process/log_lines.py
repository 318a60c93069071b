"""Reads log lines back, as `twinplane.process.logs` writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

_TEXT = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (?P<level>[a-z]+) +(?P<rest>.*)", re.DOTALL)
_FIELD = re.compile(r' (?P<key>\w+)=(?P<value>"(?:[^"\\]|\\.)*"(?= |$)|[^ ]*)')
_FAILURES = ("error", "critical")


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a log. The values of `fields` are text."""

    level: str
    message: str
    fields: Mapping[str, str]

    def failure(self) -> str:
        """What it says went wrong; empty for a line that is no error.

        The line "stopped" has its sentence in its reason, see the operations page.
        """
        if self.level not in _FAILURES:
            return ""
        detail = self.fields.get("reason") or self.fields.get("error", "")
        if not detail and "exception" in self.fields:
            detail = self.fields["exception"].strip().splitlines()[-1]
        return f"{self.message}: {detail}" if detail else self.message


def read_line(line: str) -> LogLine | None:
    """The line in either format; None for what is no line of a log."""
    return _read_json(line) if line.startswith("{") else _read_text(line)


def _read_json(line: str) -> LogLine | None:
    try:
        values = json.loads(line)
    except ValueError:
        return None
    if not isinstance(values, dict) or not {"level", "message"} <= values.keys():
        return None
    fields = {
        key: value if isinstance(value, str) else json.dumps(value) for key, value in values.items()
    }
    return LogLine(fields.pop("level"), fields.pop("message"), fields)


def _read_text(line: str) -> LogLine | None:
    match = _TEXT.fullmatch(line)
    if match is None:
        return None
    rest = match["rest"]
    found = list(_FIELD.finditer(rest))
    message = rest[: found[0].start()] if found else rest
    return LogLine(
        match["level"], message, {field["key"]: _unquoted(field["value"]) for field in found}
    )


def _unquoted(value: str) -> str:
    """Quoted text as it was; anything else as it is."""
    if len(value) < 2 or not value.startswith('"'):
        return value
    try:
        return str(json.loads(value))
    except ValueError:
        return value
