"""What is logged can be read back, in either format; what is no log line is told apart."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinplane.process.log_lines import read_line
from twinplane.process.logs import JsonFormatter, TextFormatter, fields

WORDS = st.from_regex(r"[a-z]+( [a-z]+){0,4}", fullmatch=True)
KEYS = st.from_regex(r"[a-z_]{1,12}", fullmatch=True).filter(
    lambda key: key not in ("time", "level", "logger", "message", "exception")
)
# A value that is quoted as it is can't be told from one that the formatter has quoted.
VALUES = st.text(max_size=60).filter(lambda value: not value.startswith('"'))


def record(level: int, message: str, values: dict[str, str]) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": "here",
            "levelno": level,
            "levelname": logging.getLevelName(level),
            "msg": message,
            "created": 1.5e9,
            **fields(**values),
        }
    )


@given(
    st.sampled_from([logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR]),
    WORDS,
    st.dictionaries(KEYS, VALUES, max_size=4),
)
def test_both_formats_are_read_back(level: int, message: str, values: dict[str, str]) -> None:
    made = record(level, message, values)
    for formatter in (JsonFormatter(), TextFormatter()):
        line = read_line(formatter.format(made))
        assert line is not None
        assert (line.level, line.message) == (logging.getLevelName(level).lower(), message)
        assert {key: line.fields[key] for key in values} == values


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ModuleNotFoundError: No module named 'x'",
        "twinplane worker: --threads must be at least 1",
        "{",
        "{}",
        '["level", "message"]',
        '{"level": "info"}',
        "12:00 info half a time",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_what_no_logger_wrote_is_no_log_line(line: str) -> None:
    assert read_line(line) is None


@pytest.mark.parametrize(
    ("level", "values", "failure"),
    [
        (logging.INFO, {"reason": "SIGTERM"}, ""),
        (logging.WARNING, {"error": "x"}, ""),
        (logging.ERROR, {"reason": "no file a b"}, "it ended: no file a b"),
        (logging.CRITICAL, {"error": "x = 'y z'"}, "it ended: x = 'y z'"),
        (logging.ERROR, {}, "it ended"),
    ],
)
def test_a_failure_is_the_message_and_its_cause(
    level: int, values: dict[str, str], failure: str
) -> None:
    for formatter in (JsonFormatter(), TextFormatter()):
        line = read_line(formatter.format(record(level, "it ended", values)))
        assert line is not None and line.failure() == failure
