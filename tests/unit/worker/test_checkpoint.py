"""Model folders: what is read, what is remembered, and what a broken one says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from worker_service.load_errors import CheckpointInvalid
from worker_service.weights.checkpoint import DIGEST_CACHE_NAME, Checkpoint
from worker_service.weights.content import content_digest
from worker_service.weights.sources.interface import no_check


def folder_with(path: Path, value: float = 1.0, config: str = "{}") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config)
    save_file({"a": torch.full((2, 3), value), "b": torch.arange(4)}, path / "model.safetensors")
    return path


def digest(folder: Path) -> str:
    with Checkpoint(folder) as checkpoint:
        return content_digest(
            checkpoint.config_bytes(), checkpoint.describe(checkpoint.names(), no_check).values()
        )


def sharded(path: Path) -> Path:
    path.mkdir()
    (path / "config.json").write_text('{"x": 1}')
    save_file({"a": torch.ones(2)}, path / "one.safetensors")
    save_file({"b": torch.zeros(3)}, path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def test_tensors_come_by_name_with_their_dtype(tmp_path: Path) -> None:
    with Checkpoint(folder_with(tmp_path)) as checkpoint:
        assert checkpoint.names() == {"a", "b"}
        assert checkpoint.tensor("a", (2, 3)).tolist() == [[1.0] * 3] * 2
        assert checkpoint.tensor("b", (4,)).dtype is torch.int64


def test_several_files_are_one_checkpoint(tmp_path: Path) -> None:
    with Checkpoint(sharded(tmp_path / "m")) as checkpoint:
        assert checkpoint.config == {"x": 1}
        assert checkpoint.names() == {"a", "b"}
        assert checkpoint.tensor("b", (3,)).tolist() == [0.0, 0.0, 0.0]


def test_the_digest_is_of_the_content(tmp_path: Path) -> None:
    first = digest(folder_with(tmp_path / "1"))
    assert len(first) == 64
    assert digest(folder_with(tmp_path / "2")) == first
    assert digest(folder_with(tmp_path / "3", value=2.0)) != first
    assert digest(folder_with(tmp_path / "4", config='{"rope_theta": 2}')) != first


def test_the_digest_is_remembered_until_a_file_changes(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    first = digest(folder)
    cache = folder / DIGEST_CACHE_NAME
    remembered = json.loads(cache.read_text())
    remembered["tensors"]["a"] = "f" * 64
    cache.write_text(json.dumps(remembered))
    assert digest(folder) != first  # it was read, not computed
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    os.utime(folder / "model.safetensors", ns=(stamp, stamp + 1))
    assert digest(folder) == first


def test_the_digest_is_the_same_however_tensors_are_split_into_files(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "config.json").write_text('{"x": 1}')
    save_file({"b": torch.zeros(3), "a": torch.ones(2)}, whole / "model.safetensors")
    assert digest(whole) == digest(sharded(tmp_path / "m"))


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"files": [], "tensors": {"a": "x"}}'])
def test_a_broken_digest_cache_is_ignored(tmp_path: Path, content: str) -> None:
    folder = folder_with(tmp_path)
    first = digest(folder)
    (folder / DIGEST_CACHE_NAME).write_text(content)
    assert digest(folder) == first


def test_a_digest_needs_no_place_to_be_kept(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    (folder / ".twinplane-digest.partial").mkdir()  # nothing can be written under this name
    assert len(digest(folder)) == 64
    assert not (folder / DIGEST_CACHE_NAME).exists()


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    with Checkpoint(folder_with(tmp_path)) as checkpoint:
        with pytest.raises(CheckpointInvalid, match=r"lack the tensor lm_head\.weight"):
            checkpoint.tensor("lm_head.weight", (1,))
        with pytest.raises(CheckpointInvalid, match=r"shape \(2, 3\).*implies \(3, 2\)"):
            checkpoint.tensor("a", (3, 2))


def test_broken_folders_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match="not a folder"):
        Checkpoint(tmp_path / "nowhere")
    folder = folder_with(tmp_path / "m")
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointInvalid, match=r"config\.json is missing"):
        Checkpoint(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointInvalid, match="cannot be read as JSON"):
        Checkpoint(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointInvalid, match="must hold a JSON object"):
        Checkpoint(folder)
    (folder / "config.json").write_text("{}")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CheckpointInvalid, match="cannot be read as safetensors"):
        Checkpoint(folder)
    weights.unlink()
    with pytest.raises(CheckpointInvalid, match="only safetensors weights are read"):
        Checkpoint(folder)


def test_broken_indices_say_what_is_wrong(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    (folder / "two.safetensors").unlink()
    with pytest.raises(CheckpointInvalid, match=r"two\.safetensors is missing"):
        Checkpoint(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(CheckpointInvalid, match="not a file of this folder"):
        Checkpoint(folder)
    index.write_text("{}")
    with pytest.raises(CheckpointInvalid, match="no weight_map"):
        Checkpoint(folder)
