"""Which tokens end a sequence: all those of which some file of the model's folder says so.

    generation_config.json    eos_token_id
    config.json               eos_token_id, and that of its text_config
    tokenizer_config.json     eos_token, also within extra_special_tokens
    special_tokens_map.json   eos_token, likewise

The files of one model often name different ones: the end of a text here, the end of a turn there. A
model that has learnt either ends with it. A file that names none (null, an empty list) adds none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.json_files import read_object

_ID_KEY = "eos_token_id"
_TOKEN_KEY = "eos_token"
_EXTRA_KEY = "extra_special_tokens"


@dataclass(frozen=True, slots=True)
class EndTokens:
    """`ids` are all, `named` those that are named by their text: special tokens for sure."""

    ids: frozenset[int] = frozenset()
    named: frozenset[int] = frozenset()


def read_end_tokens(
    folder: Path,
    id_of: Callable[[str], int | None],
    token_count: int,
    *,
    eos_token: str | None = None,
) -> EndTokens:
    """Reads the four files. Raises ModelFilesInvalid, which names the file and the key.

    `id_of` is the tokenizer's, which has `token_count` ids. `eos_token` is what the tokenizer's
    class makes of the files, which may leave it to the class. A named token that the tokenizer does
    not know ends nothing. An id must be one of the model's: below config.json's vocab_size or,
    where that is not said, below `token_count`.
    """
    config_file = folder / "config.json"
    config = read_object(config_file)
    text_config = config.get("text_config")
    if text_config is not None and not isinstance(text_config, dict):
        raise ModelFilesInvalid(f"{config_file}: text_config is not an object")
    limit = _vocabulary_size(config, text_config or {}) or token_count
    generation_file = folder / "generation_config.json"
    ids = [
        *_ids(generation_file, _ID_KEY, read_object(generation_file).get(_ID_KEY), limit),
        *_ids(config_file, _ID_KEY, config.get(_ID_KEY), limit),
    ]
    if text_config is not None:
        ids += _ids(config_file, f"text_config.{_ID_KEY}", text_config.get(_ID_KEY), limit)
    texts = [] if eos_token is None else [eos_token]
    texts += [
        text
        for name in ("tokenizer_config.json", "special_tokens_map.json")
        for text in _texts(folder / name)
    ]
    named = frozenset(token_id for text in texts if (token_id := id_of(text)) is not None)
    return EndTokens(named.union(ids), named)


def _vocabulary_size(*configs: Mapping[str, Any]) -> int | None:
    """The first that is said; whether it is true is for the worker, which has the weights."""
    sizes = [size for config in configs if type(size := config.get("vocab_size")) is int]
    return sizes[0] if sizes else None


def _ids(path: Path, key: str, value: Any, limit: int) -> list[int]:
    """One id, a list of ids, or None."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in ids:
        if type(token_id) is not int:  # True and False are of type bool
            raise ModelFilesInvalid(f"{path}: {key} is not a token id or a list of token ids")
        if not 0 <= token_id < limit:
            raise ModelFilesInvalid(
                f"{path}: {key} is {token_id}, which is not in the vocabulary of {limit} tokens"
            )
    return ids


def _texts(path: Path) -> Iterator[str]:
    """The texts of the end-of-sequence tokens that a file of the tokenizer's names."""
    content = read_object(path)
    places = {_TOKEN_KEY: content}
    if isinstance(extra := content.get(_EXTRA_KEY), dict):
        places[f"{_EXTRA_KEY}.{_TOKEN_KEY}"] = extra
    for key, place in places.items():
        token = place.get(_TOKEN_KEY)
        # A token is written as a string or as an object with `content`.
        text = token.get("content") if isinstance(token, dict) else token
        if token is not None and not isinstance(text, str):
            raise ModelFilesInvalid(f"{path}: {key} is not a token")
        if text:
            yield text
