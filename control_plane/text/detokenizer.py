"""Turns tokens into text as they arrive, and never emits half a character.

However the tokens are grouped when they are pushed, the joined texts equal the decoding of all
tokens at once, to the character, including U+FFFD for broken bytes.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol


class Detokenizer(Protocol):
    """One sequence's decoding state."""

    def push(self, token_ids: Sequence[int]) -> str:
        """The characters that these tokens complete."""
        ...

    def flush(self) -> str:
        """The text still held, when no token follows; incomplete characters become U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """For byte-level vocabularies: a token is the same few bytes of UTF-8 wherever it stands.

    `piece` gives a token's bytes, and no bytes for tokens that are not shown. Python's decoder
    replaces broken bytes as `tokenizers` does: one U+FFFD per maximal part of a character.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._piece, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For all other vocabularies: a token's text depends on the token before (spaces, byte runs).

    A window of tokens is decoded with and without the new ones; the difference is the new text. The
    window begins with the last tokens that gave text, so the new tokens are not decoded as if they
    began the text. A run of byte tokens is held back until it ends, because decoding judges a run
    as one: until then none of its text is certain. (The window is the idea of "prefix and read
    offset" in text-generation-inference's decode_token.)

    `decode` is the vocabulary's decoding. `is_visible` tells which tokens it shows, and `is_byte`
    which tokens stand for single bytes.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        is_visible: Callable[[int], bool],
        is_byte: Callable[[int], bool],
    ) -> None:
        self._decode = decode
        self._is_visible = is_visible
        self._is_byte = is_byte
        self._window: list[int] = []
        self._read = 0
        """Number of tokens at the start of the window whose text was emitted."""
        self._settled = 0
        """Number of tokens at the start of the window that no later token can change."""

    def push(self, token_ids: Sequence[int]) -> str:
        for token_id in filter(self._is_visible, token_ids):
            self._window.append(token_id)
            if not self._is_byte(token_id):
                self._settled = len(self._window)
        return self._emit(self._settled)

    def flush(self) -> str:
        return self._emit(len(self._window))

    def _emit(self, end: int) -> str:
        if end == self._read:
            return ""
        before = self._decode(self._window[: self._read])
        text = self._decode(self._window[:end])[len(before) :]
        if text:
            del self._window[: self._read]
            end -= self._read
            self._settled -= self._read
        self._read = end
        return text
