"""What a reader has: a shell to type into, and terminals in which servers run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.first_day.page import Typed

PAUSE_SECONDS = 0.05


class NotAsWritten(AssertionError):
    """The page says something else than what happens; carries what was seen."""


def pattern_of(line: str) -> str:
    """A regular expression for a line of the page: … is any text, PID a number."""
    parts = re.split(r"(…|\bPID\b|\s+)", line.strip())
    special = {"…": ".*?", "PID": r"(?P<pid>\d+)"}
    return "".join(
        special.get(part) or (r"\s+" if part.isspace() else re.escape(part)) for part in parts
    )


def find_in_order(lines: Sequence[str], output: str) -> tuple[str | None, str]:
    """Looks for the lines, in their order. Returns the first that is missing, and the PID seen."""
    rest, pid = output.splitlines(), ""
    for line in lines:
        pattern = re.compile(pattern_of(line))
        for number, candidate in enumerate(rest):
            if match := pattern.search(candidate):
                pid = match.groupdict().get("pid") or pid
                rest = rest[number + 1 :]
                break
        else:
            return line, pid
    return None, pid


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Whether it became true in that time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(PAUSE_SECONDS)
    return True


class Shell:
    """The reader's own terminal: one bash from the first command to the last."""

    def __init__(self, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        self._count = 0
        with log.open("wb") as sink:
            self._bash = subprocess.Popen(
                ["bash"],
                cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=sink,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def type(self, typed: Typed, text: str, seconds: float) -> str:
        """Runs a block; returns what it printed. Raises NotAsWritten if its exit code is wrong."""
        begin = self._log.stat().st_size
        self._count += 1
        mark = f"=== block {self._count} ended with "
        assert self._bash.stdin is not None
        self._bash.stdin.write(f"{{\n{text}}} < /dev/null\nprintf '\\n{mark}%s\\n' $?\n".encode())
        self._bash.stdin.flush()

        def output() -> str:
            return self._log.read_bytes()[begin:].decode(errors="replace")

        ended = re.compile(rf"\n{mark}(\d+)\n$")
        wait_until(lambda: bool(ended.search(output()) or self._bash.poll() is not None), seconds)
        seen = output()
        match = ended.search(seen)
        if match is None:
            raise NotAsWritten(f"no end within {seconds:.0f} s:\n{text}\n{seen[-2000:]}")
        seen = seen[: match.start()]
        if (match[1] != "0") != ("fails" in typed.marks):
            raise NotAsWritten(f"exit code {match[1]}:\n{text}\n{seen[-3000:]}")
        return seen

    def close(self) -> None:
        """Ends bash and what it left running."""
        if self._bash.poll() is None:
            os.killpg(self._bash.pid, signal.SIGKILL)
        self._bash.wait()
        assert self._bash.stdin is not None
        self._bash.stdin.close()


class Server:
    """A terminal in which one command runs until Ctrl-C."""

    def __init__(self, text: str, folder: Path, environment: Mapping[str, str], log: Path) -> None:
        self._log = log
        # Whoever runs this in the background has SIGINT ignored, and so would its children.
        with log.open("wb") as sink:
            self._process = subprocess.Popen(
                ["env", "--default-signal=INT", "bash", "-c", text],
                cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=sink,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def output(self) -> str:
        """All that it has printed."""
        return self._log.read_text(errors="replace")

    def see(self, lines: Sequence[str], seconds: float) -> str:
        """Waits for the lines; returns the PID among them. Raises NotAsWritten."""
        found: tuple[str | None, str] = (None, "")

        def is_there() -> bool:
            nonlocal found
            # Whether it still runs is asked first: its last words are out by then.
            has_ended = self._process.poll() is not None
            found = find_in_order(lines, self.output)
            return found[0] is None or has_ended

        wait_until(is_there, seconds)
        missing, pid = found
        if missing is not None:
            raise NotAsWritten(f"the terminal does not show: {missing}\n{self.output[-4000:]}")
        return pid

    def press_ctrl_c(self, count: int, seconds: float) -> None:
        """As from a keyboard: to the whole foreground. Raises NotAsWritten if it goes on."""
        for number in range(count):
            os.killpg(self._process.pid, signal.SIGINT)
            if number + 1 < count:
                wait_until(
                    lambda: "draining" in self.output or self._process.poll() is not None, seconds
                )
        if not wait_until(lambda: self._process.poll() is not None, seconds):
            raise NotAsWritten(f"Ctrl-C does not end it\n{self.output[-4000:]}")

    def close(self) -> None:
        """Kills it if it still runs."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
