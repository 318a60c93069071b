"""Processes that are started oddly: closed streams, small limits, no locale, no folder to be in."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes import ROOT, free_port, is_serving, plane_environment
from twinplane import Client, Message

pytestmark = pytest.mark.slow

SECONDS = 60.0
_CLI = "import sys; from twinplane.cli import main; sys.exit(main())"
ASCII = {
    "LC_ALL": "C",
    "LANG": "C",
    "PYTHONIOENCODING": "ascii",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}
LINKS = {
    "TWINPLANE_SERVICE_HOST": "10.96.0.7",
    "TWINPLANE_PORT": "tcp://10.96.0.7:50051",
    "TWINPLANE_PORT_50051_TCP_ADDR": "10.96.0.7",
    "TWINPLANE_WORKER_PORT": "tcp://10.96.0.8:50061",
}
CASES: dict[str, tuple[str, dict[str, str]]] = {
    "no stdin": ('exec "$@" <&-', {}),
    "no stdout": ('exec "$@" >&-', {}),
    "no stderr": ('exec "$@" 2>&-', {}),
    "no stream at all": ('exec "$@" <&- >&- 2>&-', {}),
    "64 open files": ('ulimit -n 64; exec "$@"', {}),
    "umask 077": ('umask 077; exec "$@"', {}),
    "no rights for anybody": ('umask 777; umask 377; exec "$@"', {}),
    "files of no length": ('ulimit -f 0; exec "$@"', {}),
    "a folder that is gone": ('mkdir "$GONE"; cd "$GONE"; rmdir "$GONE"; exec "$@"', {}),
    "ASCII": ('exec "$@"', ASCII),
    "Latin": ('exec "$@"', {"PYTHONIOENCODING": "latin-1"}),
    "no PATH": ('exec "$@"', {"PATH": "/nowhere"}),
    "no HOME": ('unset HOME; exec "$@"', {}),
    "HOME is a file": ('exec "$@"', {"HOME": "/dev/null"}),
    "no TMPDIR": ('exec "$@"', {"TMPDIR": "/nowhere", "TEMP": "/proc"}),
    "service links": ('exec "$@"', LINKS),
    "a proxy": ('exec "$@"', {"http_proxy": "http://127.0.0.1:1", "https_proxy": "x://y"}),
    "signals ignored": ('trap "" PIPE XFSZ HUP CHLD; exec "$@"', {}),
    "a folder of other modules": ('cd "$SHADOW"; exec "$@"', {}),
}


@pytest.fixture
def short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tp ü") as folder:
        yield Path(folder)


def shadow(folder: Path) -> Path:
    """A current folder whose modules have the names of others."""
    for package in ("control_plane", "worker_service", "json", "grpc", "numpy"):
        (folder / "shadow" / package).mkdir(parents=True, exist_ok=True)
        (folder / "shadow" / package / "__init__.py").write_text("raise RuntimeError('not me')")
    return folder / "shadow"


def started(case: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    shell, variables = CASES[case]
    environment = plane_environment(
        GONE=str(folder / "gone"), SHADOW=str(shadow(folder)), TMPDIR=str(folder)
    )
    environment |= variables
    command = ["/bin/sh", "-c", shell, "sh", sys.executable, "-P", "-c", _CLI, *arguments]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=environment
        )


def wait_until_serving(address: str, process: subprocess.Popen[bytes], folder: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_serving(address):
        log = (folder / "log").read_text(errors="replace")
        assert process.poll() is None and time.monotonic() < deadline, log
        time.sleep(0.02)


@pytest.mark.parametrize("case", CASES)
def test_a_worker_starts_and_ends(case: str, short_folder: Path, tiny_model: Path) -> None:
    socket = short_folder / "w.sock"
    process = started(
        case, short_folder, "worker", "--simulate", f"--model={tiny_model}", f"--uds={socket}"
    )
    try:
        wait_until_serving(f"unix:{socket}", process, short_folder)
        assert socket.stat().st_mode & 0o777 == 0o600
        process.terminate()
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
    assert not socket.exists()
    assert "Traceback" not in (short_folder / "log").read_text(errors="replace")


@pytest.mark.parametrize(
    "case",
    [
        *("no stream at all", "64 open files", "ASCII", "service links", "signals ignored"),
        "a folder of other modules",
    ],
)
def test_both_planes_serve(case: str, short_folder: Path, tiny_model: Path) -> None:
    port = free_port()
    model = short_folder / "modèle 日本"
    model.symlink_to(tiny_model)
    flags = ("--simulate", f"--model={model}", f"--port={port}", "--metrics-port=none")
    process = started(case, short_folder, "up", *flags)
    address = f"127.0.0.1:{port}"
    try:
        wait_until_serving(address, process, short_folder)
        with Client(address, timeout=SECONDS) as client:
            for prompt in ("ü", [Message("user", "ü")]):
                result = client.generate(prompt, max_tokens=3, ignore_eos=True).result()
                assert len(result.token_ids) == 3
        process.terminate()
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in (short_folder / "log").read_text(errors="replace")


@pytest.mark.parametrize("arguments", [(), ("--help",), ("--version",), ("model", "list")])
def test_a_full_output_is_one_line(arguments: tuple[str, ...]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    done = subprocess.run(
        [sys.executable, "-c", _CLI, *arguments],
        stdout=full, stderr=subprocess.PIPE, check=False, cwd=ROOT, env=plane_environment(),
    )  # fmt: skip
    os.close(full)
    assert done.returncode == 1
    assert done.stderr.startswith(b"twinplane")
    assert done.stderr.endswith(b"No space left on device\n")
    assert done.stderr.count(b"\n") == 1
