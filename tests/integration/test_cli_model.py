"""`twinplane model` as it is typed: list, show, rm, and revisions of hub models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.planes import plane_environment, running_planes
from tests.unit.twinplane.cli_process import run
from twinplane import Client

COMMIT = "c" * 40


@pytest.fixture
def home(tmp_path: Path, tiny_model: Path) -> Path:
    """A TWINPLANE_HOME with one model, which has no weights."""
    shutil.copytree(tiny_model, tmp_path / "home" / "models" / "mine")
    return tmp_path / "home"


@pytest.fixture
def variables(home: Path, tiny_model: Path, tmp_path: Path) -> dict[str, str]:
    """Of an environment with that model, and revision v1 of org/name in the hub's cache."""
    repository = tmp_path / "hf" / "hub" / "models--org--name"
    shutil.copytree(tiny_model, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "v1").write_text(COMMIT)
    return {"TWINPLANE_HOME": str(home), "HF_HOME": str(tmp_path / "hf")}


def test_list_tells_what_has_no_weights(variables: dict[str, str]) -> None:
    listed = json.loads(run("model", "list", "--json", **variables).stdout)
    assert [(one["name"], one["has_weights"]) for one in listed] == [
        ("mine", False),
        ("org/name@v1", False),
    ]
    lines = run("model", "list", **variables).stdout.splitlines()
    assert len(lines) == 2
    assert all(line.endswith("(tokenizer only)") for line in lines)


def test_show_says_what_a_model_is(variables: dict[str, str]) -> None:
    shown = json.loads(run("model", "show", "org/name@v1", "--json", **variables).stdout)
    assert shown["name"] == "org/name@v1"
    assert (shown["vocabulary_size"], shown["chat_template"]) == (259, True)
    text = run("model", "show", "simulated", **variables).stdout
    assert "vocabulary size  370\n" in text
    assert "chat template    yes\n" in text
    missing = run("model", "show", "org/name", **variables)
    assert missing.returncode == 1
    assert "run: twinplane model pull org/name" in missing.stderr


def test_rm_removes_what_is_listed(variables: dict[str, str], home: Path) -> None:
    done = run("model", "rm", "mine", **variables)
    assert (done.returncode, done.stdout) == (0, "removed mine (0 MB)\n")
    assert not (home / "models" / "mine").exists()
    assert run("model", "rm", "org/name@v1", **variables).returncode == 0
    assert json.loads(run("model", "list", "--json", **variables).stdout) == []
    again = run("model", "rm", "mine", **variables)
    assert again.returncode == 1
    assert "model mine is not among those of `twinplane model list`" in again.stderr


@pytest.mark.parametrize(
    ("name", "revision"),
    [("smollm2-135m-instruct", "v1"), ("org/name@a", "b"), ("org/name", ""), ("/folder", "v1")],
)
def test_only_one_revision_of_a_hub_id_can_be_pulled(name: str, revision: str) -> None:
    done = run("model", "pull", name, f"--revision={revision}")
    assert done.returncode == 2
    assert "--revision: only a hub id (org/name) has revisions, and one at a time" in done.stderr


def test_a_revision_without_weights_serves_a_control_plane_and_a_simulated_worker(
    variables: dict[str, str], tmp_path: Path
) -> None:
    environment = plane_environment(**variables)
    with (
        running_planes(tmp_path, "org/name@v1", environment=environment) as planes,
        Client(planes.address, timeout=60.0) as client,
    ):
        assert client.generate("ab", max_tokens=3, ignore_eos=True).result().model == "org/name@v1"
