"""A process that ends at once runs nothing more of the interpreter's own exit."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CODE = """
import atexit, threading
from twinplane.process.exit import exit_at_once
atexit.register(print, "the interpreter's own exit")
threading.Thread(target=threading.Event().wait).start()  # the interpreter would wait for it
print("before")
exit_at_once(7)
"""


def test_it_ends_with_its_code_after_what_was_printed() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "before\n", "")


CHILD = """
import subprocess, sys
from twinplane.process.exit import exit_at_once
sleeps = "import time; print(1, flush=True); time.sleep(99)"
child = subprocess.Popen([sys.executable, "-c", sleeps])
print(child.pid, flush=True)
exit_at_once(0)
"""


def test_it_takes_its_children_with_it() -> None:
    # The output ends when the last process that holds it does: the child would sleep for 99 s.
    ended = subprocess.run(
        [sys.executable, "-c", CHILD], capture_output=True, text=True, timeout=60, check=True
    )
    assert int(ended.stdout.split()[0])


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM), (signal.SIGHUP, -signal.SIGHUP)],
)
def test_it_ends_as_by_a_signal(number: signal.Signals, code: int) -> None:
    by_signal = CODE.replace("exit_at_once(7)", f"exit_by(signal.Signals({int(number)}))")
    by_signal = by_signal.replace("exit_at_once", "exit_by").replace(
        "import atexit", "import signal, atexit"
    )
    ended = subprocess.run(
        [sys.executable, "-c", by_signal], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (code, "before\n", "")
