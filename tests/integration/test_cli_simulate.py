"""`twinplane up --simulate` serves with the control extra alone: no model, no torch, no home."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.planes import ROOT, free_port, plane_environment
from tests.unit.twinplane.cli_process import PATIENCE, run
from twinplane.cli import planes
from twinplane.models import DEFAULT_MODEL, SIMULATED_MODEL

ABSENT = ("torch", "transformers", "safetensors", "triton")
SITE = f"""
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition('.')[0] in {ABSENT!r}:
            raise ModuleNotFoundError(f'No module named {{name!r}}', name=name)
sys.meta_path.insert(0, Absent())
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of an `up --simulate` in an empty folder, in whose environment there is nothing else."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="tp") as name:
        folder = Path(name)
        (folder / "site").mkdir()
        (folder / "site" / "sitecustomize.py").write_text(SITE)
        (folder / "simulated").mkdir()  # a folder of that name changes nothing
        environment = plane_environment(
            PYTHONPATH=f"{folder / 'site'}:{ROOT}",
            TMPDIR=name,
            HOME="/nonexistent",
            TWINPLANE_HOME="/nonexistent/home",
            HF_HOME="/nonexistent/hub",
        )
        command = [sys.executable, "-m", "twinplane.cli", "up", "--simulate"]
        with (
            (folder / "log").open("w") as log,
            subprocess.Popen(
                [*command, f"--port={port}", "--metrics-port=none", "--simulate-step-ms=1"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                cwd=folder,
                env=environment,
            ) as process,
        ):
            try:
                assert process.stdout is not None
                ready = process.stdout.readline()
                assert ready.startswith("ready: simulated on "), (folder / "log").read_text()
                yield f"127.0.0.1:{port}"
                process.terminate()
                assert process.wait(PATIENCE) == 0
            finally:
                process.kill()


def test_it_answers_in_words(address: str) -> None:
    done = run("generate", "--raw", "--json", "--max-tokens=40", "--address", address, "Hé")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["model"] == "simulated"
    assert answer["usage"]["prompt_tokens"] == 3
    assert answer["text"].replace(" ", "").isalpha()


def test_it_chats(address: str) -> None:
    done = run("chat", "--address", address, stdin="hello\nagain\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.strip()


@pytest.mark.parametrize("command", ["up", "worker"])
def test_without_simulate_the_simulated_model_is_refused(command: str) -> None:
    done = run(command, "--model=simulated")
    assert done.returncode == 2
    assert "model simulated has no weights: add --simulate" in done.stderr


@pytest.mark.parametrize(
    ("flags", "file", "expected"),
    [
        ((), "", (DEFAULT_MODEL, DEFAULT_MODEL)),
        (("--simulate",), "", (SIMULATED_MODEL, SIMULATED_MODEL)),
        (("--simulate", "--model=m"), "", ("m", "m")),
        (("--simulate",), "model = 'm'", ("m", "m")),
        (("--simulate",), "[control]\nmodel = 'm'", (SIMULATED_MODEL, "m")),
        (("--simulate",), "[worker]\nmodel = 'm'", ("m", "m")),
        ((), "[worker]\nsimulate = true", (SIMULATED_MODEL, SIMULATED_MODEL)),
    ],
)
def test_the_control_planes_model_is_the_workers_unless_it_is_named(
    flags: tuple[str, ...], file: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    (tmp_path / "settings.toml").write_text(file)
    parser = argparse.ArgumentParser()
    planes.add_arguments(parser)
    namespace = parser.parse_args([f"--config={tmp_path / 'settings.toml'}", *flags])
    worker = planes.resolve_worker(planes.worker_flags(namespace), {})
    control = planes.resolve_control(planes.control_flags(namespace), {}, worker)
    assert (worker.model, control.model) == expected
