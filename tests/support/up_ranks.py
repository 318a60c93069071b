"""`twinplane up` with several workers, as a process, and who dies in it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.planes import ROOT, free_port, plane_environment
from twinplane import Client

SECONDS = 180.0
_IS = re.compile(r"the (?P<name>worker \d+) is (?:process|back: process) (?P<pid>\d+)")


class Ranks:
    """The command, and the process of each of its workers. Its output is read as it comes."""

    def __init__(self, folder: Path, flags: Sequence[str]) -> None:
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self.log = folder / f"up-{port}.log"
        own = (f"--port={port}", "--metrics-port=none", "--log-format=json")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "twinplane.cli", "up", *own, *flags],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=ROOT, env=plane_environment(),
            )  # fmt: skip
        self._pids: dict[str, list[int]] = {}
        self._ready = False
        self._moved = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def close(self) -> None:
        """Ends it, however."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(SECONDS)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._moved:
                self._ready |= line.startswith("ready: ")
                if match := _IS.match(line):
                    self._pids.setdefault(match["name"], []).append(int(match["pid"]))
                self._moved.notify_all()

    def await_workers(self, count: int) -> None:
        """Waits until all serve."""
        self._wait(lambda: self._ready and len(self._pids) == count)

    def kill(self, number: int) -> None:
        """SIGKILL, and waits until another process is in its place."""
        name = f"worker {number}"
        with self._moved:
            pids = list(self._pids[name])
        os.kill(pids[-1], signal.SIGKILL)
        self._wait(lambda: len(self._pids[name]) > len(pids))

    def freeze(self, number: int, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        with self._moved:
            pid = self._pids[f"worker {number}"][-1]
        os.kill(pid, signal.SIGSTOP)
        try:
            threading.Event().wait(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    def _wait(self, condition: object) -> None:
        assert callable(condition)
        with self._moved:
            assert self._moved.wait_for(condition, SECONDS), self.log_end()

    def attachments(self) -> list[dict[str, object]]:
        """What the control plane logged whenever it got a replica."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line[:1] == "{"]
        return [line for line in lines if line["message"] == "worker attached"]

    def log_end(self) -> str:
        """The last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])


@contextmanager
def running(folder: Path, workers: int, *flags: str) -> Iterator[Ranks]:
    """Started, and stopped in order."""
    made = Ranks(folder, flags)
    try:
        made.await_workers(workers)
        yield made
        made.process.send_signal(signal.SIGTERM)
        assert made.process.wait(SECONDS) == 0, made.log_end()
    finally:
        made.close()


Prompt = str | Sequence[int]


class Streams:
    """Generations side by side, each in a thread of its own: all greedy or, with `seeded`, every
    other one sampled."""

    def __init__(
        self, address: str, prompts: Sequence[Prompt], token_count: int, *, seeded: bool = True
    ) -> None:
        self._seeded = seeded
        self._counts = [0] * len(prompts)
        self._moved = threading.Condition()
        self._tokens: list[list[int]] = [[] for _ in prompts]
        self._errors: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._run, args=(n, address, prompt, token_count), daemon=True)
            for n, prompt in enumerate(prompts)
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int, address: str, prompt: Prompt, token_count: int) -> None:
        try:
            with Client(address) as client:
                draws = self._seeded and number % 2
                sampled = {"temperature": 0.8, "seed": number} if draws else {"temperature": 0.0}
                for delta in client.generate(
                    prompt, max_tokens=token_count, ignore_eos=True, **sampled
                ):
                    self._tokens[number] += delta.token_ids
                    with self._moved:
                        self._moved.notify_all()
        except Exception as error:
            self._errors.append(error)
            with self._moved:
                self._moved.notify_all()

    def reach(self, count: int) -> None:
        """Waits until each has so many tokens."""
        with self._moved:
            assert self._moved.wait_for(
                lambda: bool(self._errors) or min(map(len, self._tokens)) >= count, SECONDS
            )
        assert not self._errors, self._errors

    def result(self) -> list[list[int]]:
        """The tokens of each, once all are over. Raises what one of them raised."""
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a stream does not end"
        assert not self._errors, self._errors
        return self._tokens
