"""The Makefile offers what the documents promise, and CI runs it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support.planes import ROOT


def make(*arguments: str) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", *arguments],
        cwd=ROOT, env=environment, check=True, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    return done.stdout


def test_help_lists_every_target_with_a_word_about_it() -> None:
    lines = [line.split(None, 1) for line in make().splitlines()]
    assert {"setup", "run", "test", "check", "lint", "protos", "bench", "against", "clean"} <= {
        name for name, _ in lines
    }


def test_ci_runs_make_test_and_nothing_else() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert script.read_text().splitlines()[-1] == "exec make test"


def test_setup_installs_what_ci_pins() -> None:
    plan = make("-n", "setup", "VENV=/nonexistent/venv")
    options = "--constraints requirements/ci.txt --extras worker,dev --torch auto"
    assert options in " ".join(plan.replace("\\\n", " ").split())
    choices = ("CONSTRAINTS=", "EXTRAS=control,dev", "TORCH=any")
    plan = make("-n", "setup", "VENV=/nonexistent/venv", *choices)
    assert "--constraints" not in plan
    assert "--extras control,dev --torch any" in plan


def test_setup_installs_again_only_for_other_extras(tmp_path: Path) -> None:
    """A later command without a word about extras keeps those that were chosen."""
    (tmp_path / "bin").mkdir()
    venv = f"VENV={tmp_path}"
    for name, text in ((".extras", "control,dev\n"), (".installed", ""), (".stubs", "")):
        (tmp_path / name).write_text(text)
    assert "install.py" not in make("-n", "setup", venv)
    assert "install.py" not in make("-n", "setup", venv, "EXTRAS=control,dev")
    assert "--extras worker,dev" in make("-n", "setup", venv, "EXTRAS=worker,dev")
    (tmp_path / ".extras").unlink()
    assert "install.py" not in make("-n", "setup", venv)


def test_against_names_the_revision() -> None:
    assert " -m bench.against v9 --quick" in make("-n", "against", "REVISION=v9", "ARGS=--quick")


def test_the_lock_pins_exactly_and_names_no_build() -> None:
    lines = (ROOT / "requirements" / "ci.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert "torch==2.13.0" in pins
    for pin in pins:
        name, _, version = pin.partition("==")
        assert name
        assert version
        assert "+" not in version
        assert " " not in pin
