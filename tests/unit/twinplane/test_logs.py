"""Log lines for machines and for people."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from twinplane.process.logs import LogFormat, configure, fields

OURS = ("twinplane", "control_plane", "worker_service")


@pytest.fixture(autouse=True)
def restored_root() -> Iterator[None]:
    root = logging.getLogger()
    loggers = [root, *map(logging.getLogger, OURS)]
    handlers, levels = root.handlers, [logger.level for logger in loggers]
    yield
    root.handlers = handlers
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def lines(log_format: LogFormat, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure(level, log_format, stream)
    return stream


def test_json_has_a_constant_message_and_fields() -> None:
    stream = lines(LogFormat.AUTO)
    logging.getLogger("twinplane.b").info(
        "worker attached", extra=fields(worker_id="w\n1", step_id=3)
    )
    (line,) = stream.getvalue().splitlines()
    record = json.loads(line)
    assert record["message"] == "worker attached"
    assert (record["worker_id"], record["step_id"]) == ("w\n1", 3)
    assert (record["level"], record["logger"]) == ("info", "twinplane.b")
    assert record["time"].endswith("+00:00")


def test_an_exception_stays_on_one_json_line() -> None:
    stream = lines(LogFormat.JSON)
    try:
        raise RuntimeError("oh")
    except RuntimeError:
        logging.getLogger("worker_service").exception("failed")
    (line,) = stream.getvalue().splitlines()
    assert "RuntimeError: oh" in json.loads(line)["exception"]


def test_text_is_one_line_whatever_a_field_holds() -> None:
    stream = lines(LogFormat.TEXT)
    logging.getLogger("worker_service").warning(
        "lost", extra=fields(error="a b\nc", request_id="r1")
    )
    (line,) = stream.getvalue().splitlines()
    assert line.endswith('warning lost error="a b\\nc" request_id=r1')


def test_levels_filter() -> None:
    stream = lines(LogFormat.JSON, "warning")
    logging.getLogger("worker_service").info("quiet")
    assert stream.getvalue() == ""


@pytest.mark.parametrize("level", ["debug", "info", "warning", "error"])
@pytest.mark.parametrize(
    "library", ["grpc", "grpc._cython.cygrpc", "asyncio", "urllib3", "filelock", "twinplanet"]
)
def test_libraries_only_warn(library: str, level: str) -> None:
    stream = lines(LogFormat.JSON, level)
    for ours in OURS:
        logging.getLogger(f"{ours}.x").debug("ours")
    for number in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR):
        logging.getLogger(library).log(number, "theirs")
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages.count("ours") == (len(OURS) if level == "debug" else 0)
    assert messages.count("theirs") == (1 if level == "error" else 2)
