"""Updates from files that do not fit, or that may not be read, are refused with the reason."""

from __future__ import annotations

import gc
import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.refused_updates import (
    Change,
    Served,
    assert_refused,
    copied,
    note_receivers,
    put,
    serve,
    without,
)
from tests.support.weight_updates import (
    from_disk,
    prepare,
    tensors_in,
)
from worker_service.domain.errors import UpdateInvalid
from worker_service.domain.weights import (
    Placement,
)

NORM = "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"
QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return serve(tmp_path_factory.mktemp("root"))


@pytest.fixture(autouse=True)
def noted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    note_receivers(served, monkeypatch)


def with_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def with_tensors(folder: Path, change: Change) -> None:
    tensors = tensors_in(folder)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


FOLDERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another architecture": (
        lambda folder: with_config(
            folder, architectures=["MistralForCausalLM"], model_type="mistral"
        ),
        "config.json describes another model",
    ),
    "an unknown architecture": (
        lambda folder: with_config(folder, architectures=["GPT2LMHeadModel"]),
        "architecture 'GPT2LMHeadModel' is not supported",
    ),
    "fewer layers": (lambda folder: with_config(folder, num_hidden_layers=2), "2 layers, not 3"),
    "another length": (
        lambda folder: with_config(folder, max_position_embeddings=80),
        "max_length is 80, not 160",
    ),
    "another rope": (
        lambda folder: with_config(folder, rope_parameters=None, rope_theta=7.0),
        "another model",
    ),
    "another epsilon": (lambda folder: with_config(folder, rms_norm_eps=0.5), "another model"),
    "another width": (lambda folder: with_config(folder, hidden_size=96), "hidden_size is 96"),
    "tied": (lambda folder: with_config(folder, tie_word_embeddings=True), "another model"),
    "quantized": (
        lambda folder: with_config(folder, quantization_config={"quant_method": "awq"}),
        "not supported",
    ),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json is missing"),
    "a broken config": (lambda folder: (folder / "config.json").write_text("{"), "cannot be read"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "has neither"),
    "cut off": (truncated, "cannot be read as safetensors"),
    "no safetensors": (
        lambda folder: (folder / "model.safetensors").write_text("hello"),
        "cannot be read as safetensors",
    ),
    "a tensor less": (
        lambda folder: with_tensors(folder, without(NORM)),
        f"lack the tensor {NORM}",
    ),
    "a tensor more": (
        lambda folder: with_tensors(folder, put("model.extra", torch.zeros(2))),
        "not account for the tensor model.extra",
    ),
    "another shape": (
        lambda folder: with_tensors(folder, put(NORM, torch.zeros(47))),
        r"has shape \(47,\)",
    ),
    "another format": (
        lambda folder: with_tensors(folder, put(NORM, torch.zeros(48, dtype=torch.int64))),
        "is stored as I64",
    ),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_does_not_fit(served: Served, name: str) -> None:
    change, words = FOLDERS[name]
    folder = copied(served, "unfit")
    change(folder)
    for placement in (Placement.BESIDE, Placement.IN_PLACE):
        update = from_disk("unfit", placement=placement)
        assert_refused(served, update, iter(()), UpdateInvalid, f"update.disk.path: .*{words}")


def outside(served: Served) -> Path:
    folder = served.root.parent / "outside"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(served.new, folder)
    return folder


def linked_file(served: Served, name: str) -> str:
    folder, other = copied(served, "linked"), outside(served)
    (folder / name).unlink()
    (folder / name).symlink_to(other / name)
    return "linked"


def linked_folder(served: Served) -> str:
    link = served.root / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(outside(served))
    return "link"


def round_links(served: Served) -> str:
    for one, other in (("a", "b"), ("b", "a")):
        (served.root / one).unlink(missing_ok=True)
        (served.root / one).symlink_to(other)
    return "a"


PATHS: dict[str, tuple[Callable[[Served], str], str]] = {
    "absolute": (lambda served: str(outside(served)), "not below the folder"),
    "upwards": (lambda served: f"../{outside(served).name}", "not below the folder"),
    "upwards from inside": (lambda served: f"new/../../{outside(served).name}", "not below"),
    "the root's neighbour": (lambda served: str(served.root) + "x/../outside", "can't be read"),
    "a linked folder": (linked_folder, "not below the folder"),
    "linked weights": (lambda served: linked_file(served, "model.safetensors"), "not below"),
    "a linked config": (lambda served: linked_file(served, "config.json"), "not below"),
    "links that lead round": (round_links, "can't be read"),
    "nowhere": (lambda served: "nowhere", "can't be read: No such file"),
    "empty": (lambda served: "", "must be a path"),
    "a null": (lambda served: "new\0", "must be a path"),
    "home": (lambda served: "~", "can't be read"),
    "too long": (lambda served: "x" * 5000, "can't be read: File name too long"),
    "below a file": (lambda served: "new/config.json/x", "can't be read: Not a directory"),
    "a file": (lambda served: "new/config.json", "neither a model folder nor a .gguf file"),
    "the root itself": (lambda served: ".", "config.json is missing"),
    "no GGUF": (
        lambda served: (served.root / "x.gguf").write_text("hello") and "x.gguf",
        "update.disk.path",
    ),
    "a catalogue name": (lambda served: "smollm2-135m-instruct", "can't be read"),
}


@pytest.mark.parametrize("name", PATHS)
def test_a_path_that_is_not_allowed(served: Served, name: str) -> None:
    make, words = PATHS[name]
    assert_refused(served, from_disk(make(served)), iter(()), UpdateInvalid, words)


def test_without_a_root_nothing_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    store = served.runner._weights
    monkeypatch.setattr(store, "recipe", replace(store.recipe, root=None))
    words = "reads nothing from disk; start it with --weights-root"
    for path in ("new", str(served.new), "/", ""):
        assert_refused(served, from_disk(path), iter(()), UpdateInvalid, words)


def test_links_inside_the_root_may_be_followed(served: Served) -> None:
    folder = copied(served, "hub")
    (folder / "model.safetensors").rename(served.root / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    prepare(served.runner, from_disk("hub")).drop()


# --- files that change while they are read --------------------------------------------------------


def cut(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 3)


def rewritten(path: Path) -> None:
    """Other numbers, in the same place and of the same size."""
    data = bytearray(path.read_bytes())
    data[-8:] = bytes(8)
    path.write_bytes(data)


def replaced(path: Path) -> None:
    tensors = {name: each + 1 for name, each in tensors_in(path.parent).items()}
    save_file(tensors, path.with_name("x"), {"format": "pt"})
    path.with_name("x").replace(path)


@pytest.mark.parametrize("change", [cut, rewritten, replaced])
@pytest.mark.parametrize("at", range(3, 60, 8))
@pytest.mark.parametrize("placement", [Placement.BESIDE, Placement.IN_PLACE], ids=str)
def test_files_that_change_while_they_are_read(
    served: Served, change: Callable[[Path], None], at: int, placement: Placement
) -> None:
    """After so many pieces of work. A file that is cut off would end the process if it were
    mapped; whatever comes of it, what was prepared is what its digest says."""
    folder = copied(served, "changing")
    path, pieces = folder / "model.safetensors", itertools.count()

    def is_cancelled() -> bool:
        if next(pieces) == at:
            change(path)
        return False

    made = served.runner.begin_update(from_disk(folder, placement=placement), is_cancelled)
    try:
        made.finish()
    except UpdateInvalid as refused:
        assert "chang" in str(refused) or "safetensors" in str(refused)
    else:
        assert next(pieces) <= at + 1, "it was not noticed"
    made.close()
    del made
    gc.collect()
    assert not served.made
    assert served.runner.memory_pool().prepared_bytes == 0
