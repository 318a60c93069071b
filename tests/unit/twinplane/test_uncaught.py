"""What nobody caught is a log line, and the last one says why the process ended."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support.planes import ROOT, plane_environment
from twinplane.process.log_lines import read_line

PRELUDE = """
import logging, threading, warnings
from twinplane.process.logs import LogFormat, configure
from twinplane.process.uncaught import log_what_nobody_caught
configure("info", LogFormat.{log_format})
log_what_nobody_caught()
"""


def lines(code: str, log_format: str = "JSON") -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE.format(log_format=log_format) + code],
        cwd=ROOT, env=plane_environment(), capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr.splitlines()


@pytest.mark.parametrize(
    ("code", "message", "level"),
    [
        ("warnings.warn('old\\nway', stacklevel=1)", "old", "warning"),
        ("class Bad:\n def __del__(self): 1 / 0\nbad = Bad()\ndel bad",
         "an exception was ignored", "error"),
        ("t = threading.Thread(target=lambda: 1 / 0)\nt.start(); t.join()",
         "a thread failed", "error"),
    ],
)  # fmt: skip
def test_each_kind_is_one_json_line(code: str, message: str, level: str) -> None:
    exit_code, told = lines(code)
    assert exit_code == 0
    (line,) = (json.loads(line) for line in told)
    assert message in line["message"]
    assert line["level"] == level


@pytest.mark.parametrize("log_format", ["JSON", "TEXT"])
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise OSError(2, 'No such file', 'a b')",
         "failed: FileNotFoundError: [Errno 2] No such file: 'a b'"),
        ("raise KeyError('weights')", "failed: KeyError: 'weights'"),
        ("raise ValueError('two\\nlines = 3')", "failed: ValueError: two\nlines = 3"),
        ("assert False", "failed: AssertionError"),
    ],
)  # fmt: skip
def test_the_last_line_is_why_it_ended(code: str, reason: str, log_format: str) -> None:
    exit_code, told = lines(code, log_format)
    assert exit_code == 1
    last = read_line(told[-1])
    assert last is not None
    assert (last.level, last.message, last.fields["reason"]) == ("error", "stopped", reason)
    assert "Traceback" in "\n".join(told)
