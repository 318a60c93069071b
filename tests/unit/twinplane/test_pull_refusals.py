"""config.json is looked at before weights are fetched, converted, loaded or waited for."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from tests.support.config_cases import MODEL_TYPES, random_case
from tests.support.planes import ROOT
from tests.support.tiny_spec import TINY_CONFIG
from tests.unit.twinplane.cli_process import run
from twinplane import models
from twinplane.cli import main
from twinplane.cli.served_models import check_model
from twinplane.models import ModelRefused, PullFailed
from worker_service.load_errors import LoadError
from worker_service.model.registry import describe

COMMIT = "c" * 40


class Hub:
    """A repository of a hub, and what was fetched of it."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "repository"
        self.repository.mkdir()
        self.snapshot = folder / "cache" / COMMIT
        self.fetched: list[str] = []
        self.revisions: list[str | None] = []

    def holds(self, config: dict[str, Any] | None) -> None:
        (self.repository / "model.safetensors").write_bytes(b"weights")
        (self.repository / "tokenizer.json").write_text("{}")
        if config is not None:
            (self.repository / "config.json").write_text(json.dumps(config))

    def download(
        self,
        name: str,
        *,
        revision: str | None = None,
        allow_patterns: Sequence[str] = (),
        **_: object,
    ) -> str:
        self.revisions.append(revision)
        self.snapshot.mkdir(parents=True, exist_ok=True)
        for file in self.repository.iterdir():
            if any(fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy(file, self.snapshot)
                self.fetched.append(file.name)
        return str(self.snapshot)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.download)
    return hub


def test_a_model_that_no_worker_runs_is_refused_before_its_weights(
    hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.holds({**TINY_CONFIG, "architectures": ["Qwen3ForCausalLM"]})
    assert main(["model", "pull", "org/name"]) == 1
    assert hub.fetched == ["config.json"]
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert "org/name can't be served" in line
    assert "'Qwen3ForCausalLM' is not supported; supported: LlamaForCausalLM" in line


def test_a_model_that_a_worker_runs_is_pulled_at_one_revision(hub: Hub) -> None:
    hub.holds(TINY_CONFIG)
    assert main(["model", "pull", "org/name"]) == 0
    assert {path.name for path in hub.snapshot.iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert hub.revisions == [None, COMMIT], "both fetches are of one commit"


def test_a_repository_without_a_config_is_still_told(hub: Hub) -> None:
    hub.holds(None)
    with pytest.raises(PullFailed, match=r"no config\.json"):
        models.pull("org/name")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_check_says_what_a_worker_says(model_type: str, tmp_path: Path) -> None:
    """Over random config.json files, most of them wrong in some way."""
    verdicts = set()
    for seed in range(40):
        config = random_case(model_type, seed).config
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        try:
            describe(json.loads(path.read_text()))
            expected = None
        except LoadError as error:
            expected = str(error)
        verdicts.add(expected is None)
        if expected is None:
            check_model("name", tmp_path)
        else:
            with pytest.raises(ModelRefused) as refused:
                check_model("name", tmp_path)
            assert str(refused.value) == f"name can't be served: {expected}"
    assert verdicts == {True, False}


def test_the_check_needs_no_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    script = (
        "import sys; from pathlib import Path; from twinplane.cli.served_models import check_model;"
        f"check_model('name', Path({str(tmp_path)!r})); print('torch' in sys.modules)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert found.stdout == "False\n"


def test_up_refuses_before_it_starts_anything(tmp_path: Path) -> None:
    config = {**TINY_CONFIG, "architectures": ["Qwen3ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = run("up", f"--model={tmp_path}", "--port=0", "--metrics-port=none")
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert "'Qwen3ForCausalLM' is not supported" in done.stderr
