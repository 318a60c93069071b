"""A plane that dies by SIGKILL leaves nothing that the next start trips over, and nobody behind."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.planes import ROOT, free_port, is_serving, plane_environment
from twinplane import Client, Message

pytestmark = pytest.mark.slow

SECONDS = 60.0
ROUNDS = 5
_CLI = "import sys; from twinplane.cli import main; sys.exit(main())"


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tp") as folder:
        yield Path(folder)


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    # The folder is part of the module path, which every child of ours inherits: see `left`.
    environment = plane_environment(
        TMPDIR=str(folder), TWINPLANE_HOME=str(folder / "home"), PYTHONPATH=f"{ROOT}:{folder}"
    )
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", _CLI, *arguments],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment,
        )  # fmt: skip


def left(folder: Path) -> list[psutil.Process]:
    """Processes that were started for this test and still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(folder) in process.environ().get("PYTHONPATH", ""):
                found.append(process)
        except psutil.Error:
            continue  # it has ended, or is not ours
    return [process for process in found if process.status() != psutil.STATUS_ZOMBIE]


def wait_until_nobody_is_left(folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while remaining := left(folder):
        assert time.monotonic() < deadline, [process.cmdline() for process in remaining]
        time.sleep(0.05)


def wait_until_serving(address: str, processes: list[subprocess.Popen[bytes]], log: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_serving(address):
        assert all(process.poll() is None for process in processes), log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]


def answers(address: str) -> tuple[int, ...]:
    with Client(address, timeout=SECONDS) as client:
        chat = client.generate([Message("user", "hi")], max_tokens=5, seed=1, ignore_eos=True)
        return chat.result().token_ids


@pytest.mark.parametrize("way", ["sockets", "ports"])
def test_planes_killed_at_any_moment_start_again(
    way: str, short_folder: Path, tiny_model: Path
) -> None:
    rng = random.Random(way)
    control = f"unix:{short_folder}/c.sock" if way == "sockets" else f"127.0.0.1:{free_port()}"
    worker = f"unix:{short_folder}/w.sock" if way == "sockets" else f"127.0.0.1:{free_port()}"

    def where(address: str) -> str:
        if way == "sockets":
            return f"--uds={address.removeprefix('unix:')}"
        return f"--port={address.rpartition(':')[2]}"

    commands = [
        ("worker", "--simulate", f"--model={tiny_model}", where(worker)),
        (
            *("control", f"--model={tiny_model}", f"--worker={worker}", where(control)),
            f"--metrics-port={free_port()}",
        ),
    ]
    running: list[subprocess.Popen[bytes]] = []
    expected = None
    try:
        for number in range(ROUNDS):
            running = [start(short_folder, *command) for command in commands]
            if number % 3 == 2:
                wait_until_serving(control, running, short_folder / "log")
                tokens = answers(control)
                assert expected in (None, tokens)
                expected = tokens
            else:
                # Whichever moment this is: while they import, listen, load, or serve.
                time.sleep(rng.uniform(0, 1.0))
            for process in running:
                process.send_signal(signal.SIGKILL)
                process.wait(SECONDS)
            wait_until_nobody_is_left(short_folder)
        running = [start(short_folder, *command) for command in commands]
        wait_until_serving(control, running, short_folder / "log")
        assert answers(control) == expected
        for process in reversed(running):
            process.terminate()
            assert process.wait(SECONDS) == 0
        assert not list(short_folder.glob("*.sock"))
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert "Traceback" not in (short_folder / "log").read_text()


def test_a_killed_up_leaves_nobody_and_starts_again(short_folder: Path, tiny_model: Path) -> None:
    rng = random.Random(3)
    address = f"127.0.0.1:{free_port()}"
    flags = (f"--port={address.rpartition(':')[2]}", f"--metrics-port={free_port()}")
    command = ("up", "--simulate", f"--model={tiny_model}", *flags)
    for number in range(3):
        up = start(short_folder, *command)
        try:
            if number == 2:
                wait_until_serving(address, [up], short_folder / "log")
                assert answers(address)
            else:
                time.sleep(rng.uniform(0, 1.0))
        finally:
            up.kill()
            up.wait()
        wait_until_nobody_is_left(short_folder)
    assert "Traceback" not in (short_folder / "log").read_text()
