"""Where a served model's sampling defaults come from, and what a start says about them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from control_plane.app import sampling_defaults
from control_plane.core.request import SamplingParams
from control_plane.text.errors import ModelFilesInvalid
from twinplane.settings.control import ControlConfig

SAID = {"temperature": 0.5, "top_k": 20, "repetition_penalty": 1.1}


def folder_with(folder: Path, content: dict[str, Any]) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_auto_is_what_the_files_say(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    defaults = sampling_defaults(ControlConfig(), folder_with(tmp_path, SAID))
    assert defaults.values == SamplingParams(0.5, 20)
    told, warned = caplog.records
    assert (told.levelname, told.getMessage()) == ("INFO", "sampling defaults")
    assert warned.levelname == "WARNING"
    assert "repetition_penalty=1.1" in str(vars(warned))


@pytest.mark.parametrize("content", [SAID, {"temperature": "hot"}])
def test_none_reads_nothing(
    tmp_path: Path, content: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    config = ControlConfig(generation_config="none")
    assert sampling_defaults(config, folder_with(tmp_path, content)).values == SamplingParams()
    assert not caplog.records


def test_a_model_that_says_nothing_is_nothing_to_tell(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert sampling_defaults(ControlConfig(), tmp_path).values == SamplingParams()
    assert not caplog.records


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesInvalid, match="temperature is 'hot'"):
        sampling_defaults(ControlConfig(), folder_with(tmp_path, {"temperature": "hot"}))
