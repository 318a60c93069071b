"""Reads what text work needs from a model's folder, in Hugging Face's layout.

tokenizer.json is required. tokenizer_config.json, special_tokens_map.json, generation_config.json,
config.json and the files that hold a chat template are read when they exist.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, replace
from pathlib import Path

import tokenizers

from control_plane.text.chat_template import ChatTemplate
from control_plane.text.control_tokens import added_tokens
from control_plane.text.end_of_sequence import EndTokens, read_end_tokens
from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.json_files import read_object
from control_plane.text.template_files import (
    class_defaults,
    read_special_tokens,
    read_template,
)
from control_plane.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextModel:
    """Everything of a model that text work needs. `template` is None for models without chat.

    The template is not compiled yet: one that does not compile costs chat, not the model.
    """

    tokenizer: Tokenizer
    template: ChatTemplate | None
    ends: EndTokens


def load_text_model(folder: Path, *, trust_messages: bool = False) -> TextModel:
    """Reads the folder; takes up to a second for a large vocabulary. Raises ModelFilesInvalid.

    With `trust_messages`, special tokens that are written in chat messages are those tokens.
    """
    backend = _load_backend(folder / "tokenizer.json")
    tokenizer_config = read_object(folder / "tokenizer_config.json")
    special_tokens_map = read_object(folder / "special_tokens_map.json")
    defaults = class_defaults(
        tokenizer_config,
        read_object(folder / "config.json"),
        byte_level="ByteLevel" in f"{backend.pre_tokenizer}{backend.decoder}",
    )
    special_tokens = read_special_tokens(tokenizer_config, special_tokens_map, defaults)
    _add_named(backend, special_tokens.texts)
    tokenizer = Tokenizer(backend)
    template = read_template(folder, tokenizer_config, special_tokens.named)
    if template is not None and not trust_messages:
        added = added_tokens(backend, special_tokens.texts, template.source)
        template = replace(template, added_tokens=added)
    ends = read_end_tokens(
        folder,
        tokenizer.id_of,
        tokenizer.token_count,
        eos_token=special_tokens.named.get("eos_token"),
    )
    return TextModel(tokenizer, template, ends)


def _load_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelFilesInvalid(f"{path} is missing")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises a bare Exception for every fault
        raise ModelFilesInvalid(f"{path} can't be read: {error}") from error


def _add_named(backend: tokenizers.Tokenizer, texts: Set[str]) -> None:
    """Makes special tokens of those that the files name and tokenizer.json has as plain pieces."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    plain = sorted(text for text in texts - added if backend.token_to_id(text) is not None)
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True) for text in plain])
