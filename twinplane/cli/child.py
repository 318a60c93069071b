"""One plane as a child process of `twinplane up`."""

from __future__ import annotations

import asyncio
import signal
import sys
from dataclasses import dataclass

from twinplane.cli.terminal import Say

_CHUNK_BYTES = 1 << 16
_LAST_WORDS_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Plane:
    """`arguments` for the Python interpreter; `grace_seconds` between SIGTERM and SIGKILL.

    The process has to end when its standard input does (`--exit-with-parent`): the write end is
    held by the parent, so it closes however the parent ends.
    """

    name: str
    arguments: tuple[str, ...]
    grace_seconds: float
    log_label: str = ""


class Child:
    """A started plane. `exit_code` is negative for a signal, None while it runs."""

    def __init__(self, plane: Plane, process: asyncio.subprocess.Process, say: Say) -> None:
        self.plane = plane
        self._process = process
        self._say = say
        self._logs = asyncio.create_task(self._pump())

    @classmethod
    async def start(cls, plane: Plane, say: Say) -> Child:
        """Starts the process in a session of its own: the terminal's Ctrl-C reaches only the
        parent, which stops the planes in order."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *plane.arguments,
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        return cls(plane, process, say)

    @property
    def exit_code(self) -> int | None:
        """See the class."""
        return self._process.returncode

    async def wait(self) -> None:
        """Waits for the process's end and its last log lines."""
        await self._process.wait()
        await asyncio.wait((self._logs,), timeout=_LAST_WORDS_SECONDS)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.exit_code is None:
            self._process.kill()

    async def stop(self) -> None:
        """SIGTERM, then after the grace SIGKILL; returns when the process has ended."""
        if self.exit_code is None:
            self._process.terminate()
        try:
            async with asyncio.timeout(self.plane.grace_seconds):
                await self._process.wait()
        except TimeoutError:
            self._say.error(f"the {self.plane.name} did not stop in time and is killed")
            self.kill()
        await self.wait()
        self._logs.cancel()
        assert self._process.stdin is not None
        self._process.stdin.close()

    def epitaph(self) -> str:
        """How it ended: "the worker ended with exit code 1"."""
        code = self.exit_code
        assert code is not None
        if code < 0:
            return f"the {self.plane.name} was killed by {signal.Signals(-code).name}"
        return f"the {self.plane.name} ended with exit code {code}"

    async def _pump(self) -> None:
        """Hands on the log line by line; a line without an end is cut at the chunk's size."""
        stream = self._process.stderr
        assert stream is not None
        rest = b""
        while chunk := await stream.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _CHUNK_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._say.log(self.plane.log_label, line)
        if rest:
            self._say.log(self.plane.log_label, rest)
