"""Which tokens end a sequence: the union of what the files of a model's folder say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from control_plane.text.end_of_sequence import EndTokens, read_end_tokens
from control_plane.text.errors import ModelFilesInvalid
from tests.support.quick import examples

GENERATION, CONFIG = "generation_config.json", "config.json"
TOKENIZER, MAP = "tokenizer_config.json", "special_tokens_map.json"
COUNT = 40
NAMES = {"</s>": 2, "<|im_end|>": 7, "<|eot|>": 9}


def put(folder: Path, files: dict[str, Any]) -> None:
    for name in (GENERATION, CONFIG, TOKENIZER, MAP):
        (folder / name).unlink(missing_ok=True)
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def read(folder: Path) -> EndTokens:
    return read_end_tokens(folder, NAMES.get, COUNT)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({CONFIG: {}}, set()),
        ({CONFIG: {"eos_token_id": 5}}, {5}),
        ({CONFIG: {"eos_token_id": 0}}, {0}),
        ({CONFIG: {"eos_token_id": COUNT - 1}}, {COUNT - 1}),
        ({CONFIG: {"eos_token_id": None}}, set()),
        ({CONFIG: {"eos_token_id": []}}, set()),
        ({CONFIG: {"text_config": {"eos_token_id": 6}}}, {6}),
        ({CONFIG: {"text_config": {"eos_token_id": [6, 8]}, "eos_token_id": 5}}, {5, 6, 8}),
        ({CONFIG: {"text_config": {}}}, set()),
        ({CONFIG: {"text_config": None, "eos_token_id": 5}}, {5}),
        ({CONFIG: {"vocab_size": 100, "eos_token_id": 99}}, {99}),
        ({CONFIG: {"vocab_size": 100}, GENERATION: {"eos_token_id": 99}}, {99}),
        ({CONFIG: {"text_config": {"vocab_size": 100, "eos_token_id": 99}}}, {99}),
        ({GENERATION: {"eos_token_id": [3, 3, 4]}}, {3, 4}),
        ({GENERATION: {"eos_token_id": []}, CONFIG: {"eos_token_id": 5}}, {5}),
        ({GENERATION: {"eos_token_id": None}, CONFIG: {"eos_token_id": 5}}, {5}),
        ({GENERATION: {"eos_token_id": 4}, CONFIG: {"eos_token_id": 5}}, {4, 5}),
        ({TOKENIZER: {"eos_token": "</s>"}}, {2}),
        ({TOKENIZER: {"eos_token": {"content": "</s>", "special": False}}}, {2}),
        ({TOKENIZER: {"eos_token": {"content": None}}}, None),
        ({TOKENIZER: {"eos_token": None}, MAP: {"eos_token": "<|im_end|>"}}, {7}),
        ({TOKENIZER: {"eos_token": "not there"}}, set()),
        ({TOKENIZER: {"eos_token": ""}}, set()),
        ({TOKENIZER: {"extra_special_tokens": {"eos_token": "<|eot|>"}}}, {9}),
        ({TOKENIZER: {"extra_special_tokens": ["<|eot|>"]}}, set()),
        ({TOKENIZER: {"extra_special_tokens": None}}, set()),
        ({MAP: {"eos_token": {"content": "<|im_end|>"}}}, {7}),
        (
            {
                GENERATION: {"eos_token_id": [3]},
                CONFIG: {"eos_token_id": 5},
                TOKENIZER: {"eos_token": "</s>"},
                MAP: {"eos_token": "<|im_end|>"},
            },
            {2, 3, 5, 7},
        ),
    ],
)
def test_the_union_of_what_is_said(
    tmp_path: Path, files: dict[str, Any], expected: set[int] | None
) -> None:
    put(tmp_path, files)
    if expected is None:
        with pytest.raises(ModelFilesInvalid, match=r"tokenizer_config\.json: eos_token"):
            read(tmp_path)
    else:
        ends = read(tmp_path)
        assert ends.ids == expected
        assert ends.named == expected & set(NAMES.values())


WRONG = [True, False, -1, COUNT, 2**40, 1.0, 2.5, "2", "</s>", {}, {"id": 2}, [True], [2, -1]]
WRONG += [[2, COUNT], [2.0], ["2"], [[2]], [None], [2, None]]


@pytest.mark.parametrize("wrong", WRONG, ids=repr)
@pytest.mark.parametrize("place", [CONFIG, GENERATION, "text_config"])
def test_what_is_no_token_id_is_refused_by_file_and_key(
    tmp_path: Path, place: str, wrong: object
) -> None:
    said = {"eos_token_id": wrong}
    inner = place == "text_config"
    put(tmp_path, {CONFIG: {"text_config": said}} if inner else {place: said})
    key = r"text_config\.eos_token_id" if inner else "eos_token_id"
    file = CONFIG if inner else place
    with pytest.raises(ModelFilesInvalid, match=rf"{file}: {key} "):
        read(tmp_path)


@pytest.mark.parametrize("wrong", [5, True, ["</s>"], {"id": 2}, {"content": 2}], ids=repr)
@pytest.mark.parametrize("name", [TOKENIZER, MAP])
def test_what_is_no_token_is_refused_by_file_and_key(
    tmp_path: Path, name: str, wrong: object
) -> None:
    put(tmp_path, {name: {"eos_token": wrong}})
    with pytest.raises(ModelFilesInvalid, match=rf"{name}: eos_token "):
        read(tmp_path)
    put(tmp_path, {name: {"extra_special_tokens": {"eos_token": wrong}}})
    with pytest.raises(ModelFilesInvalid, match=rf"{name}: extra_special_tokens\.eos_token "):
        read(tmp_path)


def test_an_id_of_the_tokenizers_may_be_beyond_the_models(tmp_path: Path) -> None:
    put(tmp_path, {CONFIG: {"vocab_size": 10, "eos_token_id": 10}})
    with pytest.raises(ModelFilesInvalid, match=r"eos_token_id is 10.* 10 tokens"):
        read(tmp_path)
    put(tmp_path, {CONFIG: {"vocab_size": 8}, TOKENIZER: {"eos_token": "<|eot|>"}})
    assert read(tmp_path).ids == {9}, "it is never sampled"


@pytest.mark.parametrize("name", [GENERATION, CONFIG, TOKENIZER, MAP])
@pytest.mark.parametrize("content", [b"no json", b"[]", b"\xff", b"[" * 100_000, b""])
def test_broken_files_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFilesInvalid, match=name):
        read(tmp_path)


ids = st.none() | st.integers(0, COUNT - 1) | st.lists(st.integers(0, COUNT - 1), max_size=3)
token = st.sampled_from([None, *NAMES, "not there"])
said = st.fixed_dictionaries(
    {},
    optional={
        GENERATION: st.fixed_dictionaries({}, optional={"eos_token_id": ids}),
        CONFIG: st.fixed_dictionaries({}, optional={"eos_token_id": ids}),
        TOKENIZER: st.fixed_dictionaries({}, optional={"eos_token": token}),
        MAP: st.fixed_dictionaries({}, optional={"eos_token": token}),
    },
)


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(files=said)
def test_each_file_adds_its_own_and_takes_none_away(tmp_path: Path, files: dict[str, Any]) -> None:
    put(tmp_path, files)
    whole = read(tmp_path).ids
    each = []
    for name, content in files.items():
        put(tmp_path, {name: content})
        each.append(read(tmp_path).ids)
    assert whole == set(itertools.chain(*each))
