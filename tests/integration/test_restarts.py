"""`twinplane up` with a worker that is killed: a pause, the same tokens, and nothing left held."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.planes import ROOT, free_port, plane_environment
from twinplane import Client

pytestmark = pytest.mark.slow

SECONDS = 120.0
TOKEN_COUNT = 150
ADDRESS = "127.0.0.1:50051"


class Up:
    """`twinplane up` on free ports. Its standard output is read as it comes."""

    def __init__(self, folder: Path, *flags: str) -> None:
        port, metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{port}"
        self.metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self.log = folder / "up.log"
        ports = (f"--port={port}", f"--metrics-port={metrics_port}", "--log-format=json")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "twinplane.cli", "up", *ports, *flags],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
                cwd=ROOT, env=plane_environment(),
            )  # fmt: skip
        self.line("ready: .*")
        self.pid = int(self.line(r"the worker is process (\d+); .*")[1])
        self.control_pid = int(self.line(r"the control plane is process (\d+); .*")[1])

    def line(self, pattern: str) -> re.Match[str]:
        """The next line of its output, which has to look so."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline().rstrip("\n")
        match = re.fullmatch(pattern, line)
        assert match, f"{line!r}\n{self.log.read_text()[-4000:]}"
        return match

    def is_back(self) -> None:
        """Waits for the next life of the worker."""
        self.pid = int(self.line(r"the worker is back: process (\d+)")[1])

    def control_is_back(self) -> None:
        """Waits for the next life of the control plane."""
        self.control_pid = int(self.line(r"the control plane is back: process (\d+)")[1])

    def attachments(self) -> list[dict[str, object]]:
        """What the control plane logged whenever it got its worker."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line[0] == "{"]
        return [line for line in lines if line["message"] == "worker attached"]

    def metric(self, name: str) -> float:
        """The value of a series; of several with these labels and more, the sum."""
        with urllib.request.urlopen(self.metrics_url, timeout=SECONDS) as answer:
            text = answer.read().decode()
        name, _, wanted = name.removesuffix("}").partition("{")
        found = [
            float(value)
            for labels, value in re.findall(rf"^{name}{{(.*)}} (\S+)$", text, re.MULTILINE)
            if set(wanted.split(",")) <= set(labels.split(","))
        ]
        assert found, name
        return sum(found)


@contextmanager
def up(folder: Path, *flags: str) -> Iterator[Up]:
    made = Up(folder, *flags)
    try:
        yield made
        made.process.send_signal(signal.SIGTERM)
        made.line("stopped: SIGTERM")
        assert made.process.wait(SECONDS) == 0
    finally:
        with made.process:
            made.process.kill()


class Stream:
    """A seeded stream in a thread of its own."""

    def __init__(self, address: str, seed: int, count: int = TOKEN_COUNT) -> None:
        self.tokens: list[int] = []
        self.error: Exception | None = None
        self._asked = (address, seed, count)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        address, seed, count = self._asked
        try:
            with Client(address) as client:
                for delta in client.generate("ab", seed=seed, max_tokens=count, ignore_eos=True):
                    self.tokens += delta.token_ids
        except Exception as error:
            self.error = error

    def whole(self) -> list[int]:
        """All its tokens."""
        self._thread.join(SECONDS)
        assert not self._thread.is_alive() and self.error is None, self.error
        return self.tokens


def until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(SECONDS / 0.02)):
        if condition():
            return
        pause.wait(0.02)
    pytest.fail("waited in vain")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_streams_go_on_when_their_worker_dies(
    tmp_path: Path, tiny_model: Path, number: signal.Signals
) -> None:
    flags = ("--simulate", "--simulate-step-ms=10", f"--model={tiny_model}")
    with up(tmp_path, *flags) as server:
        right = [Stream(server.address, seed) for seed in range(6)]
        undisturbed = [stream.whole() for stream in right]
        kv_before = server.metric('twinplane_kv_tokens{replica="0",state="free"}')
        streams = [Stream(server.address, seed) for seed in range(6)]
        until(lambda: all(len(stream.tokens) >= 10 for stream in streams))
        os.kill(server.pid, number)
        server.is_back()
        late = Stream(server.address, 0)
        assert [stream.whole() for stream in streams] == undisturbed
        assert late.whole() == undisturbed[0]
        if number is not signal.SIGTERM:  # one that is told to stop finishes what runs
            assert int(str(server.attachments()[-1]["sequence_count"])) >= 6
        assert server.metric('twinplane_worker_losses_total{replica="0"}') == 1
        assert server.metric('twinplane_requests_running{replica="0"}') == 0
        assert server.metric('twinplane_kv_tokens{replica="0",state="active"}') == 0
        cached = server.metric('twinplane_kv_tokens{replica="0",state="cached"}')
        free = server.metric('twinplane_kv_tokens{replica="0",state="free"}')
        assert free + cached >= kv_before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_streams_go_on_when_their_control_plane_dies(
    tmp_path: Path, tiny_model: Path, number: signal.Signals
) -> None:
    """Killed at once, or told to stop with less time than the streams take."""
    flags = ("--simulate", "--simulate-step-ms=10", f"--model={tiny_model}")
    with up(tmp_path, *flags, "--drain-grace-seconds=0.3") as server:
        right = [Stream(server.address, seed) for seed in range(6)]
        undisturbed = [stream.whole() for stream in right]
        streams = [Stream(server.address, seed) for seed in range(6)]
        until(lambda: all(len(stream.tokens) >= 10 for stream in streams))
        assert all(len(stream.tokens) < TOKEN_COUNT for stream in streams)
        os.kill(server.control_pid, number)
        server.control_is_back()
        assert [stream.whole() for stream in streams] == undisturbed
        assert server.metric('twinplane_requests_running{replica="0"}') == 0
        assert server.metric('twinplane_kv_tokens{replica="0",state="active"}') == 0
        if number is signal.SIGTERM:
            assert '"reason": "DRAINING"' in server.log.read_text()


def test_a_command_goes_on_when_its_control_plane_dies(tmp_path: Path, tiny_model: Path) -> None:
    flags = ("--simulate", "--simulate-step-ms=10", f"--model={tiny_model}")
    with up(tmp_path, *flags) as server:
        asked = [sys.executable, "-m", "twinplane.cli", "generate", "ab", "--seed=1",
                 "--max-tokens=300", "--address", server.address, "--raw"]  # fmt: skip
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        undisturbed = subprocess.run(asked, env=plane_environment(), check=True, **pipes)
        with subprocess.Popen(asked, bufsize=0, env=plane_environment(), **pipes) as command:
            assert command.stdout is not None
            begun = command.stdout.read(8)
            os.kill(server.control_pid, signal.SIGKILL)
            rest, complaints = command.communicate(timeout=SECONDS)
        assert (begun + rest, complaints) == (undisturbed.stdout, b"")
        server.control_is_back()


def drill() -> list[str]:
    """The lines of README's drill."""
    text = (ROOT / "README.md").read_text()
    (block,) = re.findall(r"^```bash\n((?:(?!```).)*^kill -9 PID$.*?)^```$", text, re.M | re.S)
    return [str(line) for line in block.strip().splitlines()]


def test_the_readme_has_a_drill_of_four_lines() -> None:
    lines = drill()
    assert len(lines) == 4
    assert lines[0].endswith("&") and lines[-1] == "wait"
    assert "`the worker is process PID`" in (ROOT / "README.md").read_text()


@pytest.mark.model
def test_the_drill_of_the_readme(tmp_path: Path) -> None:
    """Its very lines, at this server's address and with the number that it printed."""
    with up(tmp_path) as server:
        first, *rest = drill()
        ours = first.replace(".venv/bin/", f"{sys.prefix}/bin/")
        ours = ours.replace(" generate ", f" generate --address {server.address} ", 1)
        assert server.address in ours
        undisturbed = shell(ours.removesuffix("&"))
        lines = [ours, *(line.replace("PID", str(server.pid)) for line in rest)]
        assert shell("\n".join(lines)) == undisturbed
        assert len(undisturbed) > 400
        server.is_back()
        until(lambda: len(server.attachments()) == 2)
        assert server.attachments()[1]["sequence_count"] == 1, "it was killed in the middle"


def shell(script: str) -> str:
    """What bash prints."""
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        env=plane_environment(), cwd=ROOT, capture_output=True, text=True, timeout=2 * SECONDS,
        check=True,
    )  # fmt: skip
    return done.stdout
