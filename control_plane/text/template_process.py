"""The control plane's end of one render process: start it, ask it, end it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.text.frames import FrameTooLong, read_frame, write_frame

_MAX_BYTES_PER_CHARACTER = 6
"""Of JSON: a control character is written as \\u0000."""
_MAX_OTHER_REPLY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of one rendering: characters of its output, processor time, address space."""

    max_characters: int
    cpu_seconds: float
    memory_bytes: int


class ProcessEnded(Exception):
    """The process ended without a reply. `at_limit`: it had used up its processor time.

    The message goes on after "the chat template".
    """

    def __init__(self, message: str, *, at_limit: bool) -> None:
        super().__init__(message)
        self.at_limit = at_limit


class TemplateProcess:
    """One child process. One thread asks it at a time; any thread may kill it.

    Starting takes about a tenth of a second, which passes in the child. Raises OSError when the
    machine can't start it.
    """

    def __init__(self, limits: RenderLimits) -> None:
        self._limits = limits
        bounds = (limits.memory_bytes, limits.cpu_seconds, limits.max_characters)
        # Without `site` (-S) and the current folder (-P): it imports what this process can.
        self._popen = subprocess.Popen(
            [sys.executable, "-S", "-P", "-m", "control_plane.text.render_process"]
            + [str(bound) for bound in bounds],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=_environment(),
            # A Ctrl-C meant for the control plane, which drains, must not end it.
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known without asking it."""
        return self._popen.poll() is None

    def ask(self, body: bytes) -> dict[str, Any]:
        """Sends one frame of JSON; blocks until its reply. Raises ProcessEnded when none comes.

        A process that says that this reply is its last is ended.
        """
        stdin, stdout = self._popen.stdin, self._popen.stdout
        assert stdin is not None
        assert stdout is not None
        max_bytes = _MAX_BYTES_PER_CHARACTER * self._limits.max_characters + _MAX_OTHER_REPLY_BYTES
        answer = None
        # A process that answers anything but JSON of a bounded length is not ours any more.
        with suppress(OSError, FrameTooLong, ValueError, RecursionError):
            write_frame(stdin, body)
            reply = read_frame(stdout, max_bytes)
            answer = None if reply is None else json.loads(reply)
        if not isinstance(answer, dict):
            self.end()
            raise self._ended()
        if answer.get("last"):
            self.end()
        return answer

    def kill(self) -> None:
        """Ends the process at once; whoever asks it gets ProcessEnded."""
        self._popen.kill()

    def end(self) -> None:
        """Kills the process if it still runs, takes its exit code, and closes the pipes."""
        self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            # Closing writes what a frame cut short left in the buffer.
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _ended(self) -> ProcessEnded:
        code = self._popen.returncode
        if code == -signal.SIGPROF:
            seconds = self._limits.cpu_seconds
            message = f"takes more than {seconds:g} s of processor time"
            return ProcessEnded(message, at_limit=True)
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        return ProcessEnded(f"lost its process ({how})", at_limit=False)


def _environment() -> dict[str, str]:
    """What the child's Python needs to import what this one imported, and the time zone."""
    environment = {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    for name in ("LD_LIBRARY_PATH", "PYTHONHOME", "TZ"):
        if name in os.environ:
            environment[name] = os.environ[name]
    return environment
