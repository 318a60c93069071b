"""Whatever keeps a plane from starting is told at once, in its last line, with what to do."""

from __future__ import annotations

import json
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import tiny_llama
from tests.support.planes import ROOT, free_port
from tests.unit.twinplane.cli_process import run


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder that leaves room for a socket's path."""
    with tempfile.TemporaryDirectory(prefix="tp") as folder:
        yield Path(folder)


def last_reason(stderr: str) -> str:
    """What the last line says; every line is JSON."""
    lines = [json.loads(line) for line in stderr.splitlines()]
    assert (lines[-1]["level"], lines[-1]["message"]) == ("error", "stopped")
    return str(lines[-1]["reason"])


ADDRESSES = {
    "port": (("--port={taken}",), "can't listen on 127.0.0.1:{taken}: Address already in use; "
                                  "another --port may do"),
    "metrics": (("--metrics-port={taken}",), "can't listen on 127.0.0.1:{taken}: Address already "
                                             "in use; another --metrics-port may do"),
    "host": (("--host=192.0.2.1",), "can't listen on 192.0.2.1:{free}: Cannot assign requested "
                                    "address; another --host may do"),
    "metrics host": (("--metrics-host=192.0.2.1", "--metrics-port=0"),
                     "another --metrics-host may do"),
    "name": (("--host=no-such-host.invalid",), "another --host may do"),
    "no folder": (("--uds={folder}/none/a.sock",), "there is no folder {folder}/none"),
    "no socket": (("--uds={folder}",), "it exists and is no socket"),
    "long": (("--uds={folder}/" + "x" * 120,), "has at most 107 bytes"),
    "both": (("--port={free}", "--metrics-port={free}"),
             "--port and --metrics-port are both {free}"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDRESSES)
@pytest.mark.parametrize("command", ["up", "control", "worker"])
def test_addresses_are_looked_at_before_anything_is_loaded(
    short_folder: Path, command: str, name: str
) -> None:
    """There is no model at all, and the address is what is told, in one line."""
    flags, complaint = ADDRESSES[name]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        names = {"taken": taken.getsockname()[1], "free": free_port(), "folder": short_folder}
        defaults = [f"--port={names['free']}", "--metrics-port=none"]
        given = [flag.format(**names) for flag in flags]
        done = run(command, "--model=nowhere", *defaults, *given, TMPDIR=str(short_folder))
    told = complaint.format(**names)
    assert len(done.stderr.splitlines()) == 1
    if command == "up":
        assert done.returncode == 2
        assert done.stderr.startswith("twinplane up: ")
        assert told in done.stderr
    else:
        assert done.returncode == 1
        assert told in last_reason(done.stderr)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write anywhere")
def test_a_folder_that_can_not_be_written_is_named(short_folder: Path) -> None:
    short_folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    done = run("worker", "--simulate", f"--uds={short_folder}/a.sock")
    assert f"no permission to write to {short_folder}" in last_reason(done.stderr)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.save(tiny_llama.llama(), tmp_path_factory.mktemp("llama"))


WITHOUT_CUDA = {"CUDA_VISIBLE_DEVICES": ""}


def test_a_device_that_is_not_there_is_one_line(llama: Path) -> None:
    done = run("worker", "--device=cuda", f"--model={llama}", "--port=0", **WITHOUT_CUDA)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    reason = last_reason(done.stderr)
    assert reason.startswith("could not load: there is no device 'cuda' here: torch ")
    assert "; start with --device cpu, or " in reason


def test_what_nobody_expected_is_the_last_line_too(llama: Path) -> None:
    """Files of a kind that no check knows: with a traceback above."""
    (llama / "config.json").unlink()
    (llama / "config.json").mkdir()
    done = run("worker", f"--model={llama}", "--port=0")
    assert done.returncode == 1
    assert last_reason(done.stderr).startswith("could not load: ")


def test_a_torch_that_can_not_be_imported_is_one_line(tmp_path: Path, tiny_model: Path) -> None:
    """A library that it needs is missing, as on a machine with another driver."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise OSError('libcudart.so.12: cannot open shared object file')"
    )
    path = os.pathsep.join((str(tmp_path), str(ROOT)))
    done = run("worker", f"--model={tiny_model}", "--port=0", PYTHONPATH=path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert last_reason(done.stderr) == (
        "could not load: torch is installed and can't be imported: libcudart.so.12: cannot open "
        "shared object file"
    )
