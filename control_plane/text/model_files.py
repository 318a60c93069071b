"""Reads what text work needs from a model's folder, in Hugging Face's layout.

tokenizer.json is required. tokenizer_config.json, special_tokens_map.json, chat_template.jinja,
generation_config.json and config.json are read when they exist.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from control_plane.text.chat_template import ChatTemplate
from control_plane.text.end_of_sequence import EndTokens, read_end_tokens
from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.json_files import read_object
from control_plane.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """Everything of a model that text work needs. `template` is None for models without chat.

    The template is not compiled yet: one that does not compile costs chat, not the model.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    ends: EndTokens


def load_text_model(folder: Path) -> TextModel:
    """Reads the folder; takes up to a second for a large vocabulary. Raises ModelFilesInvalid."""
    tokenizer = _load_tokenizer(folder / "tokenizer.json")
    tokenizer_config = read_object(folder / "tokenizer_config.json")
    special_tokens = _special_tokens(tokenizer_config)
    template = _template(folder / "chat_template.jinja", tokenizer_config, special_tokens)
    ends = read_end_tokens(
        folder,
        tokenizer.id_of,
        tokenizer.token_count,
        eos_token=special_tokens.get("eos_token"),
    )
    return TextModel(tokenizer, template, ends)


def _load_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise ModelFilesInvalid(f"{path} is missing")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises a bare Exception for every fault
        raise ModelFilesInvalid(f"{path} can't be read: {error}") from error
    return Tokenizer(backend)


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
