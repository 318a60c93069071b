"""Log lines for machines and for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from twinplane.process.logs import LogFormat, configure, fields


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    yield
    root.handlers, root.level = handlers, level


def lines(log_format: LogFormat, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure(level, log_format, stream)
    return stream


def test_json_has_a_constant_message_and_fields() -> None:
    stream = lines(LogFormat.AUTO)
    logging.getLogger("a.b").info("worker attached", extra=fields(worker_id="w\n1", step_id=3))
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record["message"] == "worker attached"
    assert (record["worker_id"], record["step_id"]) == ("w\n1", 3)
    assert (record["level"], record["logger"]) == ("info", "a.b")
    assert record["time"].endswith("+00:00")


def test_an_exception_stays_on_one_json_line() -> None:
    stream = lines(LogFormat.JSON)
    try:
        raise RuntimeError("oh")
    except RuntimeError:
        logging.getLogger("a").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError: oh" in json.loads(line)["exception"]


def test_text_is_one_line_whatever_a_field_holds() -> None:
    stream = lines(LogFormat.TEXT)
    logging.getLogger("a").warning("lost", extra=fields(error="a b\nc", request_id="r1"))
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('warning lost error="a b\\nc" request_id=r1')


def test_levels_filter() -> None:
    stream = lines(LogFormat.JSON, "warning")
    logging.getLogger("a").info("quiet")
    assert stream.getvalue() == ""
