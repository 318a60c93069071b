"""A model folder whose files are not what they should be: the file, the reason, and what to do."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from twinplane import models
from twinplane.models import ModelInvalid
from worker_service.load_errors import CheckpointInvalid
from worker_service.weights.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SHARD = "model-00002-of-00002.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 538090408\n"
NOBODY = 65534


def single(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"a": 1}')
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, folder / SINGLE)
    return folder


def sharded(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"a": 1}')
    first = "model-00001-of-00002.safetensors"
    save_file({"a": torch.ones(2)}, folder / first)
    save_file({"b": torch.zeros(3)}, folder / SHARD)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": first, "b": SHARD}}))
    return folder


def fault(folder: Path) -> str:
    """What a worker says of the folder: one line."""
    with pytest.raises(CheckpointInvalid) as caught:
        Checkpoint(folder).close()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@contextmanager
def as_nobody() -> Iterator[None]:
    """Permissions mean nothing to root: then as a user that owns nothing."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def let_others_in(folder: Path) -> None:
    """Opens the folder and pytest's above it: up to four, of which one is a process's own."""
    for each in (folder, *folder.parents[:4]):
        if os.geteuid() == 0 and not each.stat().st_mode & stat.S_IXOTH:
            each.chmod(0o755)


def replaced_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replaced_by_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("../blobs/gone")


def replaced_by_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def replaced_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "is missing": (Path.unlink, ""),
    "is a folder": (replaced_by_folder, "is a folder, and must be a file"),
    "leads nowhere": (replaced_by_link, "is a link to ../blobs/gone, which is missing"),
    "leads to itself": (replaced_by_loop, "cannot be read (Too many levels of symbolic links)"),
    "is a pipe": (replaced_by_pipe, "is not a regular file"),
    "is empty": (
        lambda path: path.write_bytes(b""),
        "is empty; remove it and download the model again",
    ),
    "is a pointer": (lambda path: path.write_bytes(POINTER), "run `git lfs pull`"),
    "is a page": (lambda path: path.write_text("<!DOCTYPE html><html>no</html>"), "cannot be read"),
    "is cut": (lambda path: path.write_bytes(path.read_bytes()[:-3]), "cannot be read as"),
    "is longer": (lambda path: path.write_bytes(path.read_bytes() + b"{"), "cannot be read as"),
    "is nothing known": (lambda path: path.write_bytes(b"\xff" * 100), "cannot be read as"),
    "is zeros": (lambda path: path.write_bytes(bytes(1000)), "cannot be read as"),
}


@pytest.mark.parametrize("name", FAULTS)
@pytest.mark.parametrize(
    ("make", "file"),
    [(single, "config.json"), (single, SINGLE), (sharded, INDEX), (sharded, SHARD)],
    ids=["config", "weights", "index", "shard"],
)
def test_a_file_that_is_none_says_why(
    make: Callable[[Path], Path], file: str, name: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "m")
    break_it, words = FAULTS[name]
    break_it(folder / file)
    said = fault(folder)
    assert words in said
    assert file in said


@pytest.mark.parametrize("mode", [0o000, 0o200])
@pytest.mark.parametrize(
    ("make", "file"),
    [
        (single, "config.json"),
        (single, SINGLE),
        (sharded, INDEX),
        (sharded, SHARD),
        (single, "."),
    ],
)
def test_a_file_without_permission_says_permission(
    make: Callable[[Path], Path], file: str, mode: int, tmp_path: Path
) -> None:
    folder = make(tmp_path / "m")
    let_others_in(folder)
    for path in folder.iterdir():
        path.chmod(0o644)
    (folder / file).chmod(mode)
    try:
        with as_nobody():
            said = fault(folder)
            if file in (".", "config.json"):
                with pytest.raises(ModelInvalid, match="permission"):
                    models.resolve(str(folder))
        assert "permission" in said
        assert "download" not in said
        assert file in said
    finally:
        (folder / file).chmod(0o755)


def test_a_gguf_file_without_permission_says_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home").chmod(0o777)
    monkeypatch.setenv("TWINPLANE_HOME", str(tmp_path / "home"))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    file.chmod(0o000)
    let_others_in(tmp_path)
    with as_nobody(), pytest.raises(ModelInvalid, match=r"m\.gguf cannot be read.*permission"):
        models.resolve(str(file))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pytorch_model.bin", "it holds pytorch_model.bin, and only safetensors"),
        ("pytorch_model-00001-of-00002.bin", "load them with transformers"),
        ("consolidated.00.pth", "consolidated.00.pth"),
        ("model.ckpt", "model.ckpt"),
        ("tf_model.h5", "tf_model.h5"),
        ("flax_model.msgpack", "flax_model.msgpack"),
        ("weights.npz", "weights.npz"),
        ("model.onnx", "model.onnx"),
        ("model-q4.gguf", "it holds model-q4.gguf; give a .gguf file itself"),
        ("consolidated.safetensors", "which belong to no index"),
        ("model-00001-of-00002.safetensors", "which belong to no index"),
        ("README.md", "only safetensors weights are read"),
    ],
)
def test_weights_of_another_kind_are_named(name: str, words: str, tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    (folder / SINGLE).rename(folder / name)
    assert words in fault(folder)


@pytest.mark.parametrize(
    "name",
    [
        "adapter_config.json",
        "hf_quant_config.json",
        "quantize_config.json",
        "quant_config.json",
        "quantization_config.json",
    ],
)
@pytest.mark.parametrize("make", [single, sharded])
def test_what_another_file_announces_is_refused(
    make: Callable[[Path], Path], name: str, tmp_path: Path
) -> None:
    folder = make(tmp_path / "m")
    (folder / name).write_text('{"quantization": {"quant_algo": "FP8"}}')
    assert name in fault(folder)


def test_an_adapter_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    save_file({"a": torch.ones(2)}, tmp_path / "adapter_model.safetensors")
    assert "merge the adapter into its base model" in fault(tmp_path)
    with pytest.raises(ModelInvalid, match="merge the adapter"):
        models.resolve(str(tmp_path))


def test_a_folder_of_gguf_files_names_them(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf", "c.gguf", "d.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelInvalid, match=r"holds a\.gguf, b\.gguf, c\.gguf and 1 more; give"):
        models.resolve(str(tmp_path))


INDICES: dict[str, tuple[dict[str, object], str]] = {
    "none": ({}, "no weight_map"),
    "empty": ({"weight_map": {}}, "no weight_map"),
    "a list": ({"weight_map": ["a"]}, "no weight_map"),
    "a number": ({"weight_map": {"a": 1}}, "says that a is in 1"),
    "another folder": ({"weight_map": {"a": "../x.safetensors"}}, "not a file of this folder"),
    "the folder": ({"weight_map": {"a": ".."}}, "is a folder"),
    "another file": (
        {"weight_map": {"a": SHARD, "b": SHARD}},
        f"lacks the tensor a, which {INDEX}",
    ),
    "swapped": (
        {"weight_map": {"a": SHARD, "b": "model-00001-of-00002.safetensors"}},
        f"the tensor a is here, and {INDEX} says",
    ),
    "one too many": (
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": SHARD, "c": SHARD}},
        f"{SHARD} lacks the tensor c",
    ),
    "a missing file": (
        {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "x.safetensors"}},
        "x.safetensors is missing",
    ),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_that_disagrees_with_the_files_is_refused(name: str, tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    content, words = INDICES[name]
    (folder / INDEX).write_text(json.dumps(content))
    assert words in fault(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, folder / SHARD)
    assert "the tensor a" in fault(folder)


def test_weights_in_one_file_and_in_many_are_refused(tmp_path: Path) -> None:
    folder = sharded(tmp_path / "m")
    shutil.copy(single(tmp_path / "one") / SINGLE, folder / SINGLE)
    assert f"the weights twice, in {SINGLE} and in the files that {INDEX} names" in fault(folder)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": SINGLE, "b": SINGLE}}))
    Checkpoint(folder).close()


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "a": 2}', '{"a": {"b": 1, "b": true}}', '{"a": [{"b": 1, "b": 1.5}]}'],
)
def test_a_key_twice_is_refused(text: str, tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    (folder / "config.json").write_text(text)
    assert "twice" in fault(folder)
    (folder / "config.json").write_text('{"a": 1, "a": 1}')
    Checkpoint(folder).close()


def test_a_config_that_nests_without_end_is_refused(tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    (folder / "config.json").write_text('{"a":' * 100_000)
    assert "config.json cannot be read as JSON" in fault(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "m.bin", "m.gguf"])
def test_a_path_that_is_no_model_says_so(name: str, tmp_path: Path) -> None:
    folder = single(tmp_path / "m")
    (folder / "m.bin").write_bytes(b"x")
    (folder / "m.gguf").symlink_to("gone.gguf")
    with pytest.raises(ModelInvalid, match=name):
        models.resolve(str(folder / name))
