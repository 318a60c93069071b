"""`twinplane up`: serves, stops everything on one signal, and leaves no process behind."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.planes import ROOT, free_port, plane_environment
from tests.unit.twinplane.cli_process import PATIENCE, run


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@contextmanager
def up(
    folder: Path, model: Path, *flags: str, stderr: int | None = None, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """`twinplane up --simulate` on free ports with `folder` as its TMPDIR; killed at the end."""
    arguments = ("--simulate", f"--model={model}", f"--port={free_port()}", "--metrics-port=none")
    log = (folder / "log").open("w")
    with (
        log,
        subprocess.Popen(
            [sys.executable, "-m", "twinplane.cli", "up", *arguments, *flags],
            stdout=subprocess.PIPE,
            stderr=log if stderr is None else stderr,
            text=True,
            process_group=0,
            cwd=ROOT,
            env=plane_environment(TMPDIR=str(folder), **variables),
        ) as process,
    ):
        try:
            yield process
        finally:
            process.kill()


def children(process: subprocess.Popen[str]) -> dict[str, psutil.Process]:
    """By module: worker_service, control_plane."""
    return {child.cmdline()[2]: child for child in psutil.Process(process.pid).children()}


def ready_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(r"ready: .+ on (\S+); try: twinplane chat --address \S+\n", line)
    assert match, line
    return match[1]


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A TMPDIR that leaves room for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="tp") as folder:
        yield Path(folder)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_up_serves_and_one_signal_stops_everything(
    short_folder: Path, tiny_model: Path, number: signal.Signals
) -> None:
    with up(short_folder, tiny_model) as process:
        address = ready_address(process)
        planes = children(process)
        assert planes.keys() == {"worker_service", "control_plane"}
        # Out of the reach of the terminal's Ctrl-C, which would break the order.
        assert all(os.getpgid(plane.pid) != process.pid for plane in planes.values())
        private = next(short_folder.glob("twinplane-*"))
        assert private.stat().st_mode & 0o777 == 0o700
        assert run("generate", "ab", "--address", address, "--max-tokens", "3").returncode == 0
        os.killpg(process.pid, number)  # as a terminal does: to the whole group
        assert process.wait(PATIENCE) == 0
        assert not any(plane.is_running() for plane in planes.values())
        assert not private.exists()
    # Order: the control plane has drained before the worker is told.
    log = (short_folder / "log").read_text()
    assert log.index('control_plane.shell.fleet", "message": "draining') < log.index(
        'worker_service.app", "message": "draining'
    )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("name", ["worker", "control plane"])
def test_up_starts_a_dead_plane_again(
    short_folder: Path, tiny_model: Path, name: str, number: signal.Signals
) -> None:
    module = {"worker": "worker_service", "control plane": "control_plane"}[name]
    with up(short_folder, tiny_model) as process:
        address = ready_address(process)
        assert process.stdout is not None
        first = children(process)[module]
        lines = [process.stdout.readline() for _ in range(2)]
        assert any(f"the {name} is process {first.pid};" in line for line in lines)
        first.send_signal(number)
        back = re.fullmatch(rf"the {name} is back: process (\d+)\n", process.stdout.readline())
        assert back and int(back[1]) != first.pid
        assert run("generate", "ab", "--address", address, "--max-tokens", "3").returncode == 0
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
        assert process.stdout.read() == "stopped: SIGTERM\n"


@pytest.mark.parametrize("log_format", ["json", "text"])
@pytest.mark.parametrize(
    ("flags", "cause"),
    [
        (("--simulate-block-count=2", "--max-model-len=99"),
         "the worker could not load: --max-model-len is 99, but 2 blocks hold 16 tokens: "
         "raise --simulate-block-count"),
        (("--tokenizer-threads=0",), "tokenizer_threads must be at least 1, not 0"),
    ],
)  # fmt: skip
def test_the_last_line_of_up_says_why_it_did_not_start(
    short_folder: Path, tiny_model: Path, flags: tuple[str, ...], cause: str, log_format: str
) -> None:
    with up(short_folder, tiny_model, f"--log-format={log_format}", *flags) as process:
        assert process.wait(PATIENCE) in (1, 2)
    last = (short_folder / "log").read_text().splitlines()[-1]
    assert last == f"twinplane up: {cause}"


def test_the_control_planes_failure_is_the_last_line_too(
    short_folder: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """A tokenizer that only the control plane reads."""
    shutil.copytree(tiny_model, tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with up(short_folder, tmp_path / "model") as process:
        assert process.wait(PATIENCE) == 1
    last = (short_folder / "log").read_text().splitlines()[-1]
    assert last.startswith("twinplane up: the control plane can't serve the model: ")
    assert "tokenizer.json" in last


def test_the_planes_do_not_outlive_a_killed_up(short_folder: Path, tiny_model: Path) -> None:
    with up(short_folder, tiny_model) as process:
        ready_address(process)
        planes = children(process)
        process.kill()
        process.wait(PATIENCE)
        assert eventually(lambda: not any(plane.is_running() for plane in planes.values()))


def test_up_takes_both_planes_settings_from_everywhere(
    short_folder: Path, tiny_model: Path
) -> None:
    """A file and an environment with both planes' keys suit both; shared flags go to both."""
    file = short_folder / "settings.toml"
    file.write_text("log_level = 'info'\n[control]\nmax_num_waiting = 5\n[worker]\nthreads = 1\n")
    variables = {"TWINPLANE_CONFIG": str(file), "TWINPLANE_AGEING_SECONDS": "3"}
    with up(
        short_folder, tiny_model, "--served-model-name=both", "--max-num-seqs=7", **variables
    ) as process:
        address = ready_address(process)
        planes = children(process)
        for plane in planes.values():
            assert "--max-num-seqs=7" in plane.cmdline()
        assert "--port" not in " ".join(planes["worker_service"].cmdline())
        answer = run("generate", "ab", "--json", "--max-tokens=1", "--address", address)
        assert json.loads(answer.stdout)["model"] == "both"


def test_on_a_terminal_each_log_line_names_its_plane(short_folder: Path, tiny_model: Path) -> None:
    ours, theirs = pty.openpty()
    with up(short_folder, tiny_model, stderr=theirs) as process:
        os.close(theirs)
        ready_address(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
        lines = os.read(ours, 1 << 16).decode().splitlines()
    os.close(ours)
    assert any(re.match(r"worker +\| [\d:.]+ info +ready ", line) for line in lines)
    assert any(line.startswith("control plane | ") for line in lines)


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (("--masts=3",), {}, "--masts"),
        (("--port=x",), {}, "--port: 'x' is not a whole number"),
        ((), {"TWINPLANE_PROT": "1"}, "did you mean TWINPLANE_PORT?"),
        (("--model=smollm2-135m-instruct",), {}, "twinplane model pull smollm2-135m-instruct"),
        (("--model=nowhere",), {}, "no model 'nowhere'"),
    ],
)
def test_up_refuses_to_start_with_code_2(
    tmp_path: Path, flags: tuple[str, ...], variables: dict[str, str], message: str
) -> None:
    done = run("up", *flags, TWINPLANE_HOME=str(tmp_path), **variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stdout == ""
