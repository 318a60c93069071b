"""The Makefile offers what the documents promise, and CI runs it."""

from __future__ import annotations

import os
import subprocess

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
    assert "-c requirements/ci.txt -e '.[worker,dev]'" in plan
    plan = make("-n", "setup", "VENV=/nonexistent/venv", "CONSTRAINTS=", "EXTRAS=dev")
    assert " -c " not in plan
    assert "-e '.[dev]'" in plan


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
