"""What is read from a model's folder, and from where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models

from control_plane.text.chat_template import AddedToken, ChatTemplate
from control_plane.text.end_of_sequence import EndTokens
from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.model_files import TextModel, load_text_model
from tests.unit.twinplane.tiny_gguf import TinyGguf, byte_level_tokens
from twinplane.models import NoProgress
from twinplane.models.gguf.conversion import convert_gguf


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def load(folder: Path) -> TextModel:
    return load_text_model(folder)


def put(folder: Path, name: str, value: object) -> None:
    (folder / name).write_text(json.dumps(value), encoding="utf-8")


def test_a_tokenizer_is_enough(folder: Path) -> None:
    model = load(folder)
    assert model.tokenizer.id_of("</s>") == 3
    assert model.template is None
    assert model.ends.ids == frozenset()


def test_special_tokens_as_strings_or_objects(folder: Path) -> None:
    put(
        folder,
        "tokenizer_config.json",
        {
            "bos_token": {"content": "<s>", "lstrip": False},
            "eos_token": "</s>",
            "pad_token": None,
            "chat_template": "{{ bos_token }}",
        },
    )
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    added = tuple(AddedToken(name, control=True, normalized=False) for name in ("<s>", "</s>"))
    assert load(folder).template == ChatTemplate(
        "{{ bos_token }}", special_tokens, "tokenizer_config.json", added_tokens=added
    )


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer.json", "{}"),
        ("tokenizer_config.json", "no json"),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "no json"),
    ],
)
def test_broken_files_are_named(folder: Path, name: str, content: str) -> None:
    (folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelFilesInvalid, match=r"token|template|config"):
        load(folder)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesInvalid, match=r"tokenizer\.json is missing"):
        load(tmp_path)


def test_a_decoder_that_can_not_be_streamed_is_refused(folder: Path) -> None:
    backend = tokenizers.Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    backend.save(str(folder / "tokenizer.json"))
    with pytest.raises(ModelFilesInvalid, match="ByteLevel"):
        load(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_named_end_is_no_text_whatever_tokenizer_json_calls_it(folder: Path, name: str) -> None:
    put(folder, name, {"eos_token": "</s>"})
    model = load(folder)
    assert model.ends == EndTokens(frozenset({3}), frozenset({3}))


def test_a_gguf_files_ends_are_all_there(tmp_path: Path) -> None:
    tokens = [*byte_level_tokens(), "<|eot|>", "<|eom|>", "<|turn|>"]
    count = len(tokens)
    source = TinyGguf(
        tokens=tokens,
        token_types=[3, 3] + [1] * (count - 5) + [3, 4, 3],
        extra={
            "tokenizer.ggml.eot_token_id": count - 3,
            "tokenizer.ggml.eom_token_id": count - 2,
        },
    )
    source.write(tmp_path / "model.gguf")
    converted = tmp_path / "model"
    converted.mkdir()
    convert_gguf(tmp_path / "model.gguf", converted, NoProgress())
    model = load(converted)
    assert model.ends.ids == {1, count - 3, count - 2}
    assert model.ends.named == {1}
    assert model.template is not None
