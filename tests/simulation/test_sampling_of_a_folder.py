"""A served folder's generation_config.json, from the start to what is drawn."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.planes import running_planes
from tests.support.tiny_model import write_tiny_model
from twinplane import Client, SamplingDefaults

pytestmark = pytest.mark.slow

SAID = {"do_sample": False, "top_k": 7, "repetition_penalty": 1.1}


@pytest.mark.parametrize("setting", ["auto", "none"])
def test_a_folder_s_sampling_is_served_and_told(tmp_path: Path, setting: str) -> None:
    folder = write_tiny_model(tmp_path / "tiny")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | SAID))
    flags = ("--generation-config", setting, "--log-format", "json")
    with running_planes(tmp_path, folder, control_flags=flags) as planes:
        with Client(planes.address) as client:
            [model] = client.list_models()
            answers = [
                client.generate("ab", seed=seed, max_tokens=16).result().token_ids
                for seed in range(4)
            ]
            greedy = client.generate("ab", temperature=0, max_tokens=16).result().token_ids
        log = planes.control.log.read_text()
    if setting == "auto":
        assert model.default_sampling == SamplingDefaults(0.0, 7, 1.0, 0.0)
        assert {*answers} == {greedy}
        assert log.count("repetition_penalty=1.1") == 1
    else:
        assert model.default_sampling == SamplingDefaults(1.0, 0, 1.0, 0.0)
        assert len({*answers}) == 4
        assert "repetition_penalty" not in log
