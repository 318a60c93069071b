"""README.md works: each of its commands is run as it stands, on free ports."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.planes import ROOT, free_port, is_serving, plane_environment

pytestmark = [pytest.mark.slow, pytest.mark.model]

ADDRESS = "127.0.0.1:50051"
READY_SECONDS = 180.0


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its text."""

    language: str
    text: str


def blocks() -> list[Block]:
    text = (ROOT / "README.md").read_text()
    return [Block(*match) for match in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M)]


def commands(block: Block) -> list[str]:
    """The commands of a shell block; a backslash continues one."""
    return block.text.replace("\\\n", " ").strip().splitlines()


def test_the_readme_has_what_is_run_here() -> None:
    languages = [block.language for block in blocks()]
    assert languages == ["", "bash", "python", "bash", "bash", "bash"]
    assert commands(blocks()[1]) == ["make setup", "make run"]
    assert len((ROOT / "README.md").read_text().splitlines()) <= 140, "two screens"


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)]+)\)", (ROOT / "README.md").read_text())
    assert targets
    assert [target for target in targets if not (ROOT / target).exists()] == []


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Settings that a reader would not need: this environment, other ports."""
    variables = plane_environment(
        VENV=sys.prefix,
        PYTHON=sys.executable,
        TWINPLANE_PORT=str(free_port()),
        TWINPLANE_METRICS_PORT=str(free_port()),
    )
    variables.pop("MAKEFLAGS", None)  # of the make that runs these tests
    return variables


@pytest.fixture(scope="module")
def address(environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`make setup`, then `make run` in the background; interrupted at the end, as by Ctrl-C."""
    setup, run = (command.split() for command in commands(blocks()[1]))
    subprocess.run(setup, cwd=ROOT, env=environment, check=True, timeout=280)
    log = tmp_path_factory.mktemp("readme") / "run.log"
    address = f"127.0.0.1:{environment['TWINPLANE_PORT']}"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            run,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        wait_until_serving(address, process, log)
        yield address
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert not is_serving(address)


def wait_until_serving(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    pause = threading.Event()
    for _ in range(int(READY_SECONDS / 0.25)):
        if is_serving(address):
            return
        if process.poll() is not None:
            break
        pause.wait(0.25)
    pytest.fail(f"`make run` does not serve\n{log.read_text(errors='replace')[-4000:]}")


def at(address: str, text: str) -> str:
    """The text, for this address and this environment instead of the reader's."""
    return text.replace(ADDRESS, address).replace(".venv/bin/", f"{sys.prefix}/bin/")


def test_first_call_from_python(address: str, environment: dict[str, str]) -> None:
    program = blocks()[2].text
    assert ADDRESS in program
    done = subprocess.run(
        [sys.executable, "-c", at(address, program)],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "Paris" in done.stdout


def test_first_call_by_reflection(address: str, environment: dict[str, str]) -> None:
    (command,) = commands(blocks()[3])
    assert ADDRESS in command
    done = subprocess.run(
        at(address, command),
        shell=True, env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert '"started"' in done.stdout
    assert '"FINISH_REASON_STOP"' in done.stdout or '"completion_token_count": 64' in done.stdout


def test_first_call_from_the_shell(address: str, environment: dict[str, str]) -> None:
    chat, doctor = commands(blocks()[4])
    done = subprocess.run(
        at(address, f"{chat} --address {address} --temperature 0"),
        shell=True, env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert "Paris" in done.stdout
    done = subprocess.run(
        at(address, doctor),
        shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode in (0, 1), done.stderr
    assert "torch" in done.stdout
