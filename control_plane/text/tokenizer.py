"""A model's tokenizer: its tokenizer.json, run by `tokenizers`. Thread-safe, and never mutated."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import tokenizers

from control_plane.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)
from control_plane.text.errors import ModelFilesInvalid

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class Tokenizer:
    """Text to token ids and back. Raises ModelFilesInvalid for a decoder that can't be streamed."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._kinds = _decoder_kinds(backend)
        if "ByteLevel" in self._kinds and not self._kinds <= {"ByteLevel", "Fuse"}:
            raise ModelFilesInvalid(
                f"the tokenizer's decoder mixes ByteLevel with {sorted(self._kinds)}"
            )
        self._pieces: dict[int, bytes] = {}
        self._byte_tokens: dict[int, bool] = {}

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """What it runs on. Not to be changed."""
        return self._backend

    def id_of(self, token: str) -> int | None:
        """The id of a token written as in the vocabulary."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. A special token's name in the text becomes that token."""
        # The batch form releases the interpreter lock, and does not compute offsets.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of tokens. Unknown ids are left out; incomplete characters become U+FFFD."""
        return self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def detokenizer(self) -> Detokenizer:
        """A new incremental decoder. Its text equals `decode` with skip_special_tokens."""
        if "ByteLevel" in self._kinds:
            return ByteLevelDetokenizer(self._piece)
        return WindowDetokenizer(self._decode_window, self._is_visible, self._is_byte)

    def _piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None or token_id in self._special_ids:
            return b""
        try:
            return bytes([self._bytes_of_characters[character] for character in token])
        except KeyError:
            # An added token, which the vocabulary holds as plain text.
            return token.encode()

    @cached_property
    def _bytes_of_characters(self) -> dict[str, int]:
        return byte_level_alphabet()

    def _decode_window(self, token_ids: list[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _is_visible(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None

    def _is_byte(self, token_id: int) -> bool:
        if "ByteFallback" not in self._kinds:
            return False
        is_byte = self._byte_tokens.get(token_id)
        if is_byte is None:
            token = self._backend.id_to_token(token_id)
            is_byte = token is not None and _BYTE_TOKEN.fullmatch(token) is not None
            self._byte_tokens[token_id] = is_byte
        return is_byte


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's encoder.py).

    Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _decoder_kinds(backend: tokenizers.Tokenizer) -> frozenset[str]:
    if backend.decoder is None:
        return frozenset()
    # The part of tokenizer.json that describes the decoder, as JSON.
    description: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    members = description.get("decoders", [description])
    return frozenset(member["type"] for member in members)
