"""The end of a process that does not wait for its threads."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import NoReturn


def exit_at_once(code: int) -> NoReturn:
    """Ends the process with `code`, after what was printed and logged has left it.

    The interpreter's own exit ends threads where they stand in native code. Some of gRPC's and of
    the devices' abort the whole process then.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has gone
            stream.flush()
    logging.shutdown()
    os._exit(code)
