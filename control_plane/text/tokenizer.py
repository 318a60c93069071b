"""A model's tokenizer: its tokenizer.json, run by `tokenizers`. Thread-safe, and never mutated."""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from functools import cached_property

import tokenizers

from control_plane.text.decoders import decoder_kind
from control_plane.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    WindowDetokenizer,
)

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_LETTER = "<0x61>"


class Tokenizer:
    """Text to token ids and back. Raises ModelFilesInvalid for a decoder that can't be streamed.

    An id that the tokenizer does not know has no text: a model may have more ids, because its
    tensors are filled up to a round size.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._kind = decoder_kind(backend)
        added = backend.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        """Those that are matched in raw text: their ids by their texts."""
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        """Those that tokenizer.json calls special."""
        self.token_count = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """All ids are below it."""
        self._pieces: dict[int, bytes] = {}
        self._bytes: dict[int, int | None] = {}

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """What it runs on. Not to be changed."""
        return self._backend

    def id_of(self, token: str) -> int | None:
        """The id of a token written as in the vocabulary."""
        return self._backend.token_to_id(token)

    def text_of(self, token_id: int) -> str:
        """A token as it is written in the vocabulary; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids. A special token's name in the text becomes that token."""
        # The batch form releases the interpreter lock, and does not compute offsets.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    def decode(self, token_ids: Sequence[int], *, hidden: Set[int]) -> str:
        """The text of all tokens but the hidden ones: what a detokenizer makes of them."""
        shown = [token_id for token_id in token_ids if token_id not in hidden]
        text = self._decode(shown)
        if self._kind.byte_fallback and "\ufffd" in text:
            # There may be whole characters in the run of byte tokens that are broken.
            detokenizer = self.detokenizer()
            text = detokenizer.push(shown) + detokenizer.flush()
        return text

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A new incremental decoder of what comes behind a prompt. All its tokens are shown."""
        if self._kind.byte_level:
            return ByteLevelDetokenizer(self._piece, prompt)
        return WindowDetokenizer(self._decode, self._byte_of, self.id_of(_LETTER), prompt)

    @cached_property
    def writes_every_text(self) -> bool:
        """Whether the text of some tokens is `text`, for every text: it has all bytes."""
        if self._kind.byte_level:
            tokens = list(self._bytes_of_characters)
        else:
            tokens = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = [self.id_of(token) for token in tokens]
        return self._kind.keeps_bytes and None not in ids and self.special_ids.isdisjoint(ids)

    def _piece(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._make_piece(token_id)
        return piece

    def _make_piece(self, token_id: int) -> bytes:
        token = self.text_of(token_id)
        try:
            return bytes([self._bytes_of_characters[character] for character in token])
        except KeyError:
            # An added token, which the vocabulary holds as plain text.
            return token.encode()

    @cached_property
    def _bytes_of_characters(self) -> dict[str, int]:
        return byte_level_alphabet()

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._backend.decode(token_ids, skip_special_tokens=False)

    def _byte_of(self, token_id: int) -> int | None:
        """The byte that a token stands for; None for all other tokens."""
        if not self._kind.byte_fallback:
            return None
        if token_id not in self._bytes:
            match = _BYTE_TOKEN.fullmatch(self.text_of(token_id))
            self._bytes[token_id] = None if match is None else int(match[1], 16)
        return self._bytes[token_id]


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's encoder.py).

    Printable Latin-1 stands for itself; the other bytes, in order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if chr(byte) not in alphabet]
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}
