"""A process that ends at once runs nothing more of the interpreter's own exit."""

from __future__ import annotations

import subprocess
import sys

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
