"""What a simulated worker takes from a model's config.json, by the rules of a real one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.worker_rig import simulated_runner
from twinplane.models import SIMULATED_MODEL, ModelInvalid, resolve
from twinplane.settings.worker import WorkerConfig
from worker_service.load_errors import CheckpointInvalid
from worker_service.runner.interface import Runner
from worker_service.simulated.runner import SimulatedModel
from worker_service.startup import start_runner

CONFIG = {"architectures": ["NewForCausalLM"], "vocab_size": 90, "max_position_embeddings": 50}


def simulated(folder: Path, **changes: Any) -> Runner:
    values = {**CONFIG, **changes}
    (folder / "config.json").write_text(json.dumps(values))
    return start_runner(WorkerConfig(model=str(folder), simulate=True), lambda line: None)


def test_it_is_as_large_as_the_model(tmp_path: Path) -> None:
    capability = simulated(tmp_path).capability()
    assert capability.model.vocabulary_size == 90
    assert capability.model.architecture == "NewForCausalLM"
    assert capability.limits.max_sequence_token_count == 50


@pytest.mark.parametrize(
    "value", [True, "90", 90.5, None, -1, 0, float("nan"), float("inf"), [90], {"a": 1}, 2**40]
)
@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_a_wrong_type_is_never_a_value(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=f"{key} is "):
        simulated(tmp_path, **{key: value})


@pytest.mark.parametrize("value", [True, "9", 9.5, None, -1, 90, 2**40, [9], {"a": 1}])
def test_the_first_token_is_one_of_the_vocabulary(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="simulated_first_token_id is "):
        simulated(tmp_path, simulated_first_token_id=value)


def test_without_a_model_it_has_the_built_in_one() -> None:
    config = WorkerConfig(simulate=True)
    assert config.model == SIMULATED_MODEL
    capability = start_runner(config, lambda line: None).capability()
    assert capability.model.name == SIMULATED_MODEL
    assert capability.model.architecture == "Simulated"
    shape = json.loads((resolve(SIMULATED_MODEL) / "config.json").read_text())
    assert capability.model.vocabulary_size == shape["vocab_size"]
    whole = SimulatedModel("", shape["vocab_size"], capability.limits, 9)
    assert capability.weight_version != simulated_runner(whole).capability().weight_version


@pytest.mark.parametrize("value", ["NewForCausalLM", [1], {"a": 1}, 7])
def test_architectures_are_a_list_of_names(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="architectures is "):
        simulated(tmp_path, architectures=value)


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelInvalid, match=r"config\.json is missing"):
        start_runner(WorkerConfig(model=str(tmp_path), simulate=True), lambda line: None)
