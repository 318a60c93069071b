"""Which template and which special tokens a model's files give is what `transformers` reads."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models

from control_plane.text.chat_template import AddedToken
from control_plane.text.model_files import load_text_model

transformers = pytest.importorskip("transformers")

TOKENS = ("<s>", "</s>", "<unk>", "<pad>", "<img>", "<plain>")
NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "image_token", "x_token")
FLAGS = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}


def put(folder: Path, name: str, value: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer that knows all tokens; the last one only as a piece of its vocabulary."""
    vocabulary = {piece: index for index, piece in enumerate(("a", "b", *TOKENS))}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(TOKENS[:-1]))
    backend.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def some_token(rng: random.Random) -> str | dict[str, Any]:
    token = rng.choice(TOKENS)
    as_object = {"__type": "AddedToken", "content": token, "special": True, **FLAGS}
    return as_object if rng.random() < 0.25 else token


def some_files(rng: random.Random) -> dict[str, dict[str, Any]]:
    """tokenizer_config.json and perhaps the older file, each with some of the names."""
    config: dict[str, Any] = {}
    for name in NAMES:
        if rng.random() < 0.4:
            optional = name not in ("image_token", "x_token")
            config[name] = None if optional and rng.random() < 0.25 else some_token(rng)
    extra: list[object] = [
        [some_token(rng), some_token(rng)],
        {"image_token": some_token(rng), "boi_token": "<img>", "bos_token": some_token(rng)},
        [],
    ]
    if rng.random() < 0.4:
        config["extra_special_tokens"] = rng.choice(extra)
    if rng.random() < 0.2:
        config["additional_special_tokens"] = [some_token(rng)]
    if rng.random() < 0.4:
        config["added_tokens_decoder"] = {"2": {"content": "<s>", "special": True, **FLAGS}}
    files = {"tokenizer_config.json": config}
    if rng.random() < 0.5:
        older: dict[str, Any] = {}
        for name in (*NAMES[:3], "image_token", "y_token"):
            if rng.random() < 0.5:
                token = rng.choice(TOKENS)
                older[name] = rng.choice([token, {"content": token, **FLAGS}])
        kind = rng.randrange(4)
        if kind < 3:
            name = "additional_special_tokens" if kind == 0 else "extra_special_tokens"
            older[name] = {"z_token": "<img>"} if kind == 1 else ["<img>"]
        files["special_tokens_map.json"] = older
    return files


CLASSES = (None, "PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer")
CLASSES += ("LlamaTokenizerFast", "GPT2Tokenizer", "Qwen2Tokenizer", "Qwen2TokenizerFast")


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", None])
@pytest.mark.parametrize("declared", CLASSES)
@pytest.mark.parametrize("byte_level", [False, True])
def test_a_tokenizers_class_names_what_the_files_leave_out(
    folder: Path, kind: str | None, declared: str | None, byte_level: bool
) -> None:
    if not byte_level:
        backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        backend.decoder = decoders.Metaspace()
        backend.save(str(folder / "tokenizer.json"))
    put(folder, "chat_template.jinja", "x")
    put(folder, "config.json", {} if kind is None else {"model_type": kind})
    config: dict[str, object] = {"image_token": "<img>", "bos_token": "<unk>"}
    if declared is not None:
        config["tokenizer_class"] = declared
    put(folder, "tokenizer_config.json", config)
    try:
        reference = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        pytest.skip(f"transformers does not take it: {error}")
    template = load_text_model(folder).template
    assert template is not None
    assert template.special_tokens == reference.special_tokens_map, type(reference)


def of_reference(folder: Path) -> Mapping[str, str]:
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    return dict(tokenizer.special_tokens_map)


@pytest.mark.parametrize("seed", range(80))
def test_special_tokens_are_found_where_transformers_finds_them(folder: Path, seed: int) -> None:
    put(folder, "chat_template.jinja", "x")
    for name, content in some_files(random.Random(seed)).items():
        put(folder, name, content)
    template = load_text_model(folder).template
    assert template is not None
    assert template.special_tokens == of_reference(folder)


def test_a_named_token_that_is_only_a_piece_becomes_one_token(folder: Path) -> None:
    assert 7 not in load_text_model(folder).tokenizer.encode("<plain>", add_special_tokens=False)
    put(folder, "tokenizer_config.json", {"eos_token": "<plain>"})
    ids = load_text_model(folder).tokenizer.encode("a<plain>b", add_special_tokens=False)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert ids == reference.encode("a<plain>b", add_special_tokens=False) == [0, 7, 1]


def test_a_declared_token_that_is_only_a_piece_becomes_one_token(folder: Path) -> None:
    declared = {"7": {"content": "<plain>", "special": True, **FLAGS}}
    put(folder, "tokenizer_config.json", {"added_tokens_decoder": declared})
    put(folder, "chat_template.jinja", "{{ messages }}")
    model = load_text_model(folder)
    ids = model.tokenizer.encode("a<plain>b", add_special_tokens=False)
    reference = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert ids == reference.encode("a<plain>b", add_special_tokens=False) == [0, 7, 1]
    assert model.template is not None
    assert AddedToken("<plain>", control=True, normalized=False) in model.template.added_tokens


@pytest.mark.parametrize("value", [3, "x", [], {}, ["x"], {"a": 1}, None, [None], {"0": "x"}, True])
def test_strange_values_name_no_tokens(folder: Path, value: object) -> None:
    names = ("bos_token", "image_token", "extra_special_tokens", "added_tokens_decoder")
    names += ("additional_special_tokens", "model_specific_special_tokens")
    for name in names:
        if name == "bos_token" and value == "x":
            continue
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            put(folder, file, {name: value})
            put(folder, "chat_template.jinja", "x")
            template = load_text_model(folder).template
            assert template is not None
            assert set(template.special_tokens) <= {"bos_token", "image_token", "0"}
            (folder / file).unlink()


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "config"}]
MORE = "additional_chat_templates"
LAYOUTS: dict[str, dict[str, object]] = {
    "the configuration's": {"tokenizer_config.json": {"chat_template": "config"}},
    "a list": {"tokenizer_config.json": {"chat_template": NAMED}},
    "a list that names one twice": {
        "tokenizer_config.json": {"chat_template": [{"name": "default", "template": "1"}, *NAMED]}
    },
    "an object": {"tokenizer_config.json": {"chat_template": {"default": "a", "tool_use": "b"}}},
    "a file beside the configuration's": {
        "tokenizer_config.json": {"chat_template": "config"},
        "chat_template.jinja": "file",
    },
    "a file beside a list": {
        "tokenizer_config.json": {"chat_template": NAMED},
        "chat_template.jinja": "file",
    },
    "a named file only": {f"{MORE}/default.jinja": "default"},
    "a file and named files": {
        "chat_template.jinja": "file",
        f"{MORE}/tool_use.jinja": "tools",
        f"{MORE}/rag.jinja": "rag",
    },
    "two that are the default": {"chat_template.jinja": "file", f"{MORE}/default.jinja": "more"},
    "named files hide the configuration's": {
        "tokenizer_config.json": {"chat_template": "config"},
        f"{MORE}/default.jinja": "more",
    },
    "other line ends": {"chat_template.jinja": "a\r\nb\rc\n"},
    "a mark of the byte order": {"chat_template.jinja": "\ufeffa"},
    "an empty file": {"chat_template.jinja": ""},
    "named files without a default": {f"{MORE}/tool_use.jinja": "tools"},
    "named files without a default hide the configuration's": {
        "tokenizer_config.json": {"chat_template": "config"},
        f"{MORE}/tool_use.jinja": "tools",
    },
    "a list without a default": {"tokenizer_config.json": {"chat_template": NAMED[:1]}},
    "none": {},
    "a null": {"tokenizer_config.json": {"chat_template": None}},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_the_template_is_the_one_that_transformers_takes(
    folder: Path, layout: Mapping[str, object]
) -> None:
    for name, content in layout.items():
        put(folder, name, content)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    try:
        expected = tokenizer.get_chat_template()
    except ValueError:
        expected = None
    template = load_text_model(folder).template
    usable = template is not None and template.fault is None
    assert (template.source if template is not None and usable else None) == expected


@pytest.mark.parametrize(
    ("layout", "file", "fault"),
    [
        ({f"{MORE}/rag.jinja": "rag"}, MORE, "default"),
        ({"tokenizer_config.json": {"chat_template": 3}}, "tokenizer_config.json", "not a text"),
        ({"tokenizer_config.json": {"chat_template": ["x"]}}, "tokenizer_config.json", "default"),
        (
            {"tokenizer_config.json": {"chat_template": [{"name": [], "template": "x"}, {}, 3]}},
            "tokenizer_config.json",
            "default",
        ),
        (
            {"tokenizer_config.json": {"chat_template": {"default": ["x"]}}},
            "tokenizer_config.json",
            "not a text",
        ),
        ({"chat_template.json": "no json"}, "chat_template.json", "not JSON"),
        ({"chat_template.json": []}, "chat_template.json", "not a text"),
    ],
)
def test_what_is_no_template_costs_chat_alone_and_is_named(
    folder: Path, layout: Mapping[str, object], file: str, fault: str
) -> None:
    for name, content in layout.items():
        put(folder, name, content)
    template = load_text_model(folder).template
    assert template is not None
    assert template.file == file
    assert template.fault is not None
    assert fault in template.fault


def test_a_file_that_is_no_text_costs_chat_alone(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    template = load_text_model(folder).template
    assert template is not None
    assert template.fault is not None
    assert "UTF-8" in template.fault


def test_a_processors_template_serves_where_there_is_no_other(folder: Path) -> None:
    put(folder, "chat_template.json", {"chat_template": "processor"})
    template = load_text_model(folder).template
    assert template is not None
    assert (template.source, template.file) == ("processor", "chat_template.json")
    put(folder, "tokenizer_config.json", {"chat_template": "config"})
    template = load_text_model(folder).template
    assert template is not None
    assert template.source == "config"
