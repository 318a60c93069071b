"""Reads what text work needs from a model's folder, in Hugging Face's layout.

tokenizer.json is required. tokenizer_config.json, chat_template.jinja, generation_config.json and
config.json are read when they exist.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from control_plane.text.chat_template import ChatTemplate
from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """Everything of a model that text work needs. `template` is None for models without chat.

    The template is not compiled yet: one that does not compile costs chat, not the model.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    end_of_sequence_ids: frozenset[int]


def load_text_model(folder: Path) -> TextModel:
    """Reads the folder; takes up to a second for a large vocabulary. Raises ModelFilesInvalid."""
    tokenizer = _load_tokenizer(folder / "tokenizer.json")
    tokenizer_config = _load_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(tokenizer_config)
    template = _template(folder / "chat_template.jinja", tokenizer_config, special_tokens)
    return TextModel(tokenizer, template, _end_of_sequence_ids(folder, tokenizer, special_tokens))


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelFilesInvalid(f"{path} is missing")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises a bare Exception for every fault
        raise ModelFilesInvalid(f"{path} can't be read: {error}") from error
    return Tokenizer(backend)


def _load_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelFilesInvalid(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFilesInvalid(f"{path} is not a JSON object")
    return value


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and so on, each written as a string or as an object with `content`."""
    tokens = {}
    for name, value in tokenizer_config.items():
        if not name.endswith("_token"):
            continue
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _template(
    path: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    if path.is_file():
        try:
            source = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFilesInvalid(f"{path} is not UTF-8") from error
        return ChatTemplate(source, special_tokens, path.name)
    configured = _configured_template(tokenizer_config)
    if configured is None:
        return None
    return ChatTemplate(configured, special_tokens, "tokenizer_config.json")


def _configured_template(tokenizer_config: Mapping[str, Any]) -> str | None:
    match tokenizer_config.get("chat_template"):
        case None:
            return None
        case str(source):
            return source
        case [*templates]:
            named = [t for t in templates if isinstance(t, dict) and t.get("name") == "default"]
            return named[0].get("template") if named else None
        case _:
            raise ModelFilesInvalid("tokenizer_config.json: chat_template is not a template")


def _end_of_sequence_ids(
    folder: Path, tokenizer: Tokenizer, special_tokens: Mapping[str, str]
) -> frozenset[int]:
    """From the first that names any: generation_config.json, config.json, or eos_token."""
    for name in ("generation_config.json", "config.json"):
        match _load_json(folder / name).get("eos_token_id"):
            case None:
                continue
            case int(token_id):
                return frozenset((token_id,))
            case [*token_ids] if all(isinstance(token_id, int) for token_id in token_ids):
                return frozenset(token_ids)
            case _:
                raise ModelFilesInvalid(f"{folder / name}: eos_token_id is not a token id")
    named = tokenizer.id_of(special_tokens.get("eos_token", ""))
    return frozenset() if named is None else frozenset((named,))
