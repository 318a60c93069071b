"""Reads what text work needs from a model's folder, in Hugging Face's layout.

tokenizer.json is required; tokenizer_config.json, chat_template.jinja, generation_config.json and
config.json are read where they are there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tokenizers

from control_plane.text.chat_template import ChatTemplate
from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """All of a model that text work needs. `template` is None for models without chat."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    end_of_sequence_ids: frozenset[int]


def load_text_model(
    folder: Path, *, now: Callable[[], datetime], clock: Callable[[], float]
) -> TextModel:
    """Reads the folder; takes up to a second for a large vocabulary. Raises ModelFilesInvalid.

    `now` gives templates the local date, `clock` the monotonic seconds that bound rendering.
    """
    tokenizer = _load_tokenizer(folder / "tokenizer.json")
    tokenizer_config = _load_json(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(tokenizer_config)
    source = _template_source(folder / "chat_template.jinja", tokenizer_config)
    template = None
    if source is not None:
        template = ChatTemplate(source, special_tokens, now=now, clock=clock)
    return TextModel(tokenizer, template, _end_of_sequence_ids(folder, tokenizer, special_tokens))


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelFilesInvalid(f"{path} is missing")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for whatever is wrong
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
    """bos_token, eos_token and so on: written as a string, or as an object with its content."""
    tokens = {}
    for name, value in tokenizer_config.items():
        if not name.endswith("_token"):
            continue
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _template_source(path: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFilesInvalid(f"{path} is not UTF-8") from error
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
    """The first that says: generation_config.json, config.json, the tokenizer's eos_token."""
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
