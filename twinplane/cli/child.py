"""One plane as a child process of `twinplane up`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from twinplane.cli.restarts import RestartPolicy
from twinplane.cli.terminal import Terminal
from twinplane.process.log_lines import read_line

_CHUNK_BYTES = 1 << 16
_LAST_LOG_LINES_SECONDS = 1.0
_LAGGING_READER_SECONDS = 0.05
_LAST_MESSAGE = "stopped"
"""Of a plane that ends in order. Its reason follows the plane's name in a sentence."""


class Readiness(Protocol):
    """Knows when a server serves."""

    async def serving(self) -> None:
        """Returns when it does."""
        ...


@dataclass(frozen=True, slots=True)
class Restarting:
    """How a plane is started again. Its own `readiness` tells when a life of it begins to count.

    `promise` says at the end of a sentence what becomes of the answers that it was giving.
    """

    readiness: Readiness
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    promise: str = "no answer is lost"


@dataclass(frozen=True, slots=True)
class Plane:
    """How to run a plane.

    `arguments` are those of the Python interpreter. `grace_seconds` pass between the end of its
    standard input and SIGKILL. `log_label` is printed before each line of the plane's log; it may
    be empty. Without `restarting` the end of the plane is the end of all. `variables` are added to
    this process's environment.

    The process has to end when its standard input ends (`--exit-with-parent`). The parent holds the
    write end, which the system closes however the parent ends.
    """

    name: str
    arguments: tuple[str, ...]
    grace_seconds: float
    log_label: str = ""
    restarting: Restarting | None = None
    variables: Mapping[str, str] = field(default_factory=dict)


class Child:
    """A plane that was started."""

    def __init__(
        self, plane: Plane, process: asyncio.subprocess.Process, terminal: Terminal
    ) -> None:
        self.plane = plane
        self._process = process
        self._terminal = terminal
        self._last_line = ""
        self.was_killed = False
        """Whether this command killed it, since it had to."""
        self._logs = asyncio.create_task(self._forward_log())

    @classmethod
    async def start(cls, plane: Plane, terminal: Terminal) -> Child:
        """Starts the process, in a session of its own.

        The terminal's Ctrl-C therefore reaches only the parent, which stops the planes in order.
        """
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *plane.arguments,
            stdin=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={**os.environ, **plane.variables},
        )
        return cls(plane, process, terminal)

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code: negative for a signal, None while the process runs."""
        return self._process.returncode

    async def wait(self) -> None:
        """Waits until the process has ended and its last log lines are printed."""
        await self._process.wait()
        await asyncio.wait((self._logs,), timeout=_LAST_LOG_LINES_SECONDS)

    def kill(self) -> None:
        """Sends SIGKILL if the process still runs."""
        if self.exit_code is None:
            self.was_killed = True
            self._process.kill()

    async def stop(self) -> None:
        """Ends its standard input, and sends SIGKILL after the grace. Returns when it has ended.

        No signal says it: who signals a whole control group has sent one to the plane as well, and
        a second one would cut its drain short.
        """
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(self.plane.grace_seconds):
                await self._process.wait()
        except TimeoutError:
            self._terminal.error(f"the {self.plane.name} did not stop in time and is killed")
            self.kill()
        await self.wait()
        self._logs.cancel()

    def describe_exit(self) -> str:
        """Says how the process ended, such as "the worker ended with exit code 1"."""
        code = self.exit_code
        assert code is not None
        if code < 0:
            return f"the {self.plane.name} was killed by {signal.Signals(-code).name}"
        return f"the {self.plane.name} ended with exit code {code}"

    def describe_failure(self) -> str:
        """Says why the process ended, as far as its last line tells: "the worker could not load:
        there is no device 'cuda' here".
        """
        how, code = self.describe_exit(), self.exit_code
        if code == -signal.SIGKILL:
            return f"{how}, as the system does when memory runs out"
        if code in (-signal.SIGINT, -signal.SIGTERM, -signal.SIGHUP):
            return how
        line = read_line(self._last_line)
        if line is None:
            return f"{how}: {self._last_line}" if self._last_line else how
        if line.message == _LAST_MESSAGE and (reason := line.fields.get("reason")):
            return f"the {self.plane.name} {reason}" if code else f"{how}: {reason}"
        return f"{how}: {failure}" if (failure := line.failure()) else how

    async def _forward_log(self) -> None:
        """Prints the log line by line. A line longer than a chunk is cut.

        While the terminal's reader lags, the log stays in its pipe: the plane then drops lines
        itself, and counts them where its metrics and its log say so.
        """
        stream = self._process.stderr
        assert stream is not None
        rest = b""
        while chunk := await stream.read(_CHUNK_BYTES):
            while not self._terminal.keeps_up():  # noqa: ASYNC110
                await asyncio.sleep(_LAGGING_READER_SECONDS)
            *lines, rest = (rest + chunk).split(b"\n")
            if len(rest) > _CHUNK_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                self._print(line)
        if rest:
            self._print(rest)

    def _print(self, line: bytes) -> None:
        if text := line.decode(errors="replace").strip():
            self._last_line = text
        self._terminal.log(self.plane.log_label, line)
