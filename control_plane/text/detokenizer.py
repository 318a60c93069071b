"""Turns tokens into text as they arrive, behind a prompt, and never emits half a character.

However the tokens are grouped when they are pushed, the joined texts equal what decoding the prompt
and all tokens at once adds to the prompt's own text, including U+FFFD for broken bytes. A character
that the prompt begins and the tokens complete is theirs.

A detokenizer gets only tokens that are shown: its owner leaves out the hidden ones.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
_MAX_BEGUN_BYTES = 3
"""The longest characters of UTF-8 have four."""
_CONTEXT_TOKENS = 8
_MAX_FRESH_TOKENS = 64


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

    `piece` gives a token's bytes; `prompt` is what comes before the first token. Python's decoder
    replaces broken bytes as `tokenizers` does: one U+FFFD per maximal part of a character.
    """

    def __init__(self, piece: Callable[[int], bytes], prompt: Sequence[int] = ()) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = self._begin(prompt)
        """What the prompt's own text has for a character that the prompt begins; empty: nothing."""

    def push(self, token_ids: Sequence[int]) -> str:
        return self._own(self._decoder.decode(b"".join(map(self._piece, token_ids))))

    def flush(self) -> str:
        return self._own(self._decoder.decode(b"", final=True))

    def _begin(self, prompt: Sequence[int]) -> str:
        """Decodes the prompt's end, as far back as a character can begin there."""
        tail = b""
        for token_id in reversed(prompt):
            tail = self._piece(token_id) + tail
            if len(tail) >= _MAX_BEGUN_BYTES:
                break
        self._decoder.decode(tail)
        pending, _ = self._decoder.getstate()
        return pending.decode(errors="replace")

    def _own(self, text: str) -> str:
        """Without what is the prompt's: U+FFFD for a character that it began in vain."""
        if self._begun and text:
            text = text.removeprefix(self._begun)
            self._begun = ""
        return text


class WindowDetokenizer:
    """For all other vocabularies: a token's text depends on what comes before (spaces, words).

    A window of tokens is decoded with and without the new ones; the difference is the new text. The
    window begins with the last tokens that gave text, at first the prompt's last ones, so the new
    tokens are not decoded as if they began the text. (The window is the idea of "prefix and read
    offset" in text-generation-inference's decode_token.)

    Byte tokens enter the window a whole character at a time. Bytes that can't become one give a
    U+FFFD each, as in SentencePiece. `tokenizers` does the same with a run of byte tokens, except
    that a broken byte costs the whole characters of its run, too: none would be certain before the
    run ends.

    `decode` is the vocabulary's decoding. `byte_of` gives the byte that a token stands for, and
    `letter` is a byte token that is a whole character.
    """

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        byte_of: Callable[[int], int | None],
        letter: int | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._byte_of = byte_of
        self._letter = letter
        self._context: list[int] = []
        self._context_text = ""
        """What the context decodes to. Once it has some text, it always has."""
        self._fresh: list[int] = []
        """Tokens behind the context that gave no text yet."""
        self._begun: list[int] = []
        """Byte tokens that begin a character, and those bytes."""
        self._begun_bytes = b""
        self._begun_by_prompt = 0
        """How many of them are the prompt's."""
        self._begin(prompt)

    def push(self, token_ids: Sequence[int]) -> str:
        parts = []
        for token_id in token_ids:
            byte = self._byte_of(token_id)
            if byte is not None:
                parts.append(self._push_byte(token_id, bytes((byte,))))
                continue
            if self._begun:
                parts.append(self._break())
            self._fresh.append(token_id)
        parts.append(self._emit())
        return "".join(parts)

    def flush(self) -> str:
        return self._break() if self._begun else ""

    def _begin(self, prompt: Sequence[int]) -> None:
        """Takes the prompt's last tokens as the window: as many as have some text."""
        count = _CONTEXT_TOKENS
        self.push(prompt[-count:])
        while not self._context_text and count < len(prompt):
            self._context, self._fresh, self._begun, self._begun_bytes = [], [], [], b""
            count *= 2
            self.push(prompt[-count:])
        self._begun_by_prompt = len(self._begun)

    def _push_byte(self, token_id: int, byte: bytes) -> str:
        """What a byte token shows to be broken. A character that it completes enters the window."""
        text = ""
        if self._begun and _length(self._begun_bytes + byte) is None:
            text = self._break()
        self._begun.append(token_id)
        self._begun_bytes += byte
        match _length(self._begun_bytes):
            case None:
                text += self._break()
            case 0:
                pass
            case _:
                self._fresh += self._begun
                self._forget_begun()
        return text

    def _break(self) -> str:
        """The begun character will never be whole: the text before it, and a U+FFFD for each byte.

        Those of the prompt are in its own text. The window goes without them; where it has no text
        before them it gets a letter instead, because what follows does not begin the text.
        """
        text = self._emit() + _REPLACEMENT * (len(self._begun) - self._begun_by_prompt)
        if not self._context_text:
            self._context += self._fresh
            self._context += self._begun if self._letter is None else [self._letter]
            self._context_text = self._decode(self._context)
            self._fresh = []
        self._forget_begun()
        return text

    def _forget_begun(self) -> None:
        self._begun, self._begun_bytes, self._begun_by_prompt = [], b"", 0

    def _emit(self) -> str:
        """The text of the fresh tokens, as soon as they have some."""
        fresh = self._fresh
        if not fresh:
            return ""
        text = self._decode(self._context + fresh)[len(self._context_text) :]
        if text:
            self._slide()
        elif len(fresh) > _MAX_FRESH_TOKENS:
            del fresh[:-_CONTEXT_TOKENS]
        return text

    def _slide(self) -> None:
        """Leaves of the window its last tokens: as many as have some text where they are alone."""
        tokens = self._context + self._fresh
        count = min(len(self._fresh), _CONTEXT_TOKENS)
        self._fresh = []
        while True:
            # Not from the middle of a character on.
            while count < len(tokens) and self._continues(tokens[-count]):
                count += 1
            self._context = tokens[-count:]
            self._context_text = self._decode(self._context)
            if self._context_text or count >= len(tokens):
                return
            count *= 2

    def _continues(self, token_id: int) -> bool:
        byte = self._byte_of(token_id)
        return byte is not None and 0x80 <= byte < 0xC0


def _length(data: bytes) -> int | None:
    """The length of the whole character that the bytes are; 0: it is incomplete; None: no UTF-8."""
    try:
        return codecs.utf_8_decode(data, "strict", False)[1]
    except UnicodeDecodeError:
        return None
