"""The Makefile offers what the documents promise, and CI runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
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


def ci_runs(folder: Path, **pythons: str) -> list[str]:
    """What .ci/run asks of make, where a Python's name stands for a program with this text."""
    folder.mkdir()
    for name, text in {"make": 'echo "$@" >&2', **pythons}.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(folder), "PYENV_ROOT": "/nowhere"}
    done = subprocess.run(
        [ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True
    )
    return done.stderr.splitlines()


def test_ci_runs_make_test_and_the_newest_releases(tmp_path: Path) -> None:
    broken = ci_runs(tmp_path / "a", **{"python3": "exit 0", "python3.13": "exit 127"})
    assert broken == ["test", "newest PYTHON=python3"]
    newer = ci_runs(tmp_path / "b", **{"python3": "exit 0", "python3.13": "exit 0"})
    assert newer == ["test", "newest PYTHON=python3.13"]


def test_the_newest_leg_takes_no_pins_and_no_torch() -> None:
    plan = make("-n", "newest", "PYTHON=python3.13")
    assert "python3.13 -m venv --clear" in plan
    assert "'.[control]'" in plan
    assert "ci.txt" not in plan
    tools = (ROOT / "requirements" / "newest.txt").read_text().splitlines()
    assert not [tool for tool in tools if "=" in tool or "<" in tool]


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


def test_an_old_python_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    python = tmp_path / "python3.10"
    pretend = "import sys; sys.version_info = (3, 10, 9); exec(sys.argv[1])"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{pretend}" "$2"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["make", "setup", f"VENV={tmp_path}/venv", f"PYTHON={python}"],
        cwd=ROOT, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode != 0
    assert "needs Python 3.11 or newer; name one: make setup PYTHON=" in done.stderr
    assert not (tmp_path / "venv").exists()


def test_check_runs_files_side_by_side_or_in_one_process() -> None:
    plan = make("-n", "check", "ARGS=-n0").splitlines()[-1]
    assert "-n logical --maxprocesses 4 --dist loadfile" in plan
    assert plan.endswith(" -n0"), "the last one is pytest's"


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


def test_the_install_page_names_the_variables_and_extras_there_are() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    variables = re.findall(r"^\| `([A-Z]+)` \| (\S+) \|", page, re.M)
    assert {name for name, _ in variables} == {"PYTHON", "VENV", "EXTRAS", "TORCH", "CONSTRAINTS"}
    for name, default in variables:
        assert re.search(rf"^{name} \?= .*{re.escape(default)}", makefile, re.M), name
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for text in (page, (ROOT / "README.md").read_text()):
        named = re.findall(r"pip install '\.\[([\w,]+)\]'", text)
        assert set(",".join(named).split(",")) == {"control", "worker", "gpu"} <= extras.keys()
    pin = re.search(r"^torch==.*$", (ROOT / "requirements" / "ci.txt").read_text(), re.M)
    assert pin
    assert f"'{pin[0]}+cpu'" in page
