"""`twinplane completion`: bash really completes with it, and it knows every command and flag."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.planes import ROOT, plane_environment
from tests.unit.twinplane.cli_process import PATIENCE, run
from twinplane import cli

ASK = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}
"$(complete -p twinplane | sed 's/.*-F \\([^ ]*\\) .*/\\1/')" twinplane "${@: -1}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    done = run("completion", "bash")
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("completion") / "twinplane"
    path.write_text(done.stdout)
    return path


def completed(script: Path, words: Sequence[str], cwd: Path | None = None) -> set[str]:
    """What bash offers for the last of the words typed behind `twinplane`."""
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", str(script), "twinplane", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=cwd,
    )
    assert done.stderr == ""
    return {line.strip() for line in done.stdout.splitlines() if line.strip()}


def test_it_completes_every_command(script: Path) -> None:
    assert completed(script, [""]) >= set(cli.commands())
    assert completed(script, ["sta"]) == {"status"}
    assert completed(script, ["model", ""]) >= {"pull", "list", "show", "rm"}


@pytest.mark.parametrize("command", sorted(cli.commands()))
def test_it_completes_every_flag(script: Path, command: str) -> None:
    whole = "--help-all" in run(command, "--help").stdout
    shown = run(command, "--help-all" if whole else "--help").stdout
    flags = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.MULTILINE))
    assert "--help" in flags
    assert completed(script, [command, "--"]) >= flags


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["worker", "--device", "c"], {"cpu", "cuda"}),
        (["up", "--log-level", "de"], {"debug"}),
        (["control", "--arithmetic-change", ""], {"end", "continue"}),
        (["completion", "z"], {"zsh"}),
    ],
)
def test_it_completes_values(script: Path, words: list[str], expected: set[str]) -> None:
    assert completed(script, words) == expected


def test_it_completes_files_where_a_file_is_meant(script: Path, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").touch()
    assert completed(script, ["up", "--config", "set"], tmp_path) == {"settings.toml"}
    assert completed(script, ["chat", "--model", "set"], tmp_path) == set()
    for command, flag in (("chat", "--history"), ("status", "--tls-ca"), ("generate", "--tls-key")):
        assert completed(script, [command, flag, "set"], tmp_path) == {"settings.toml"}


def test_zsh_has_one_too() -> None:
    done = run("completion", "zsh")
    assert done.returncode == 0
    assert done.stdout.startswith("#compdef twinplane\n")
    assert "--simulate-step-ms" in done.stdout


def test_without_the_library_one_line_says_how_to_get_it() -> None:
    code = (
        "import sys; sys.modules['shtab'] = None\nfrom twinplane.cli import main\nsys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "completion", "bash"],
        capture_output=True, text=True, cwd=ROOT, env=plane_environment(), timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "twinplane completion: not installed: shtab; run: pip install shtab\n"
