"""The tokens that give a chat its structure, and a tokenizer that knows them by other names."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tokenizers

from control_plane.text.chat_template import AddedToken, Rendering
from control_plane.text.errors import ControlTokenWritten
from control_plane.text.forgery import TURN_ROLES

_PAIR = re.compile(r"</?(\w+)>")
_DIGITS = 4


def added_tokens(
    backend: tokenizers.Tokenizer, named: frozenset[str], template: str
) -> tuple[AddedToken, ...]:
    """A tokenizer's added tokens, by id, and which of them are control tokens.

    `named` are the special tokens that the model's files name, `template` is its template's source.
    """
    decoder = backend.get_added_tokens_decoder()
    known = {token.content for token in decoder.values()}

    def is_control(token: tokenizers.AddedToken) -> bool:
        name = token.content
        if name.isspace():
            return False
        if token.special or name in named:
            return True
        return _writes(template, name) and _has_structure(name, known)

    tokens = [decoder[token_id] for token_id in sorted(decoder)]
    return tuple(AddedToken(t.content, is_control(t), t.normalized) for t in tokens)


class ChatEncoder:
    """Makes token ids of the renderings of one template. Thread-safe; takes milliseconds to make.

    `tokens` are the tokenizer's added tokens, as `added_tokens` has them.
    """

    def __init__(self, backend: tokenizers.Tokenizer, tokens: Sequence[AddedToken]) -> None:
        self._backend = backend
        # In texts for the tokenizer beside, control tokens have names that no text has.
        self._names = [_name(i) if t.control else t.name for i, t in enumerate(tokens)]
        self._control_ids = frozenset(backend.token_to_id(t.name) for t in tokens if t.control)
        self._beside, self._ids_of_beside = self._make_beside(backend)

    def encode(self, rendering: Rendering) -> list[int]:
        """Token ids, in which only the template's own control tokens are control tokens.

        Raises ControlTokenWritten when the vocabulary has no other way to write one.
        """
        if rendering.written is None:
            ids = _encode(self._backend, rendering.text)
            # There are more where a tokenizer's normalizer makes one out of other characters.
            if rendering.own is None or self._count(ids) <= len(rendering.own):
                return ids
        assert rendering.own is not None
        parts: list[str] = []
        end = 0
        for found in rendering.own:
            parts += (rendering.text[end : found.start], self._names[found.index])
            end = found.end
        parts.append(rendering.text[end:])
        ids = [self._ids_of_beside.get(i, i) for i in _encode(self._beside, "".join(parts))]
        if self._count(ids) != len(rendering.own):
            raise ControlTokenWritten(rendering.written)
        return ids

    def _count(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens are control tokens."""
        return sum(map(self._control_ids.__contains__, token_ids))

    def _make_beside(
        self, backend: tokenizers.Tokenizer
    ) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The tokenizer that knows control tokens by other names, and what its ids stand for.

        It shares the vocabulary, so it costs little. What its vocabulary lacks gets an id behind
        the vocabulary's size, where none of the vocabulary's own may be.
        """
        beside = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            beside.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            beside.pre_tokenizer = backend.pre_tokenizer
        size = free = beside.get_vocab_size()
        while any(
            backend.model.id_to_token(token_id) is not None
            for token_id in range(free, free + len(self._names))
        ):
            free += 1
        beside.add_tokens([_name(index, kind=1) for index in range(free - size)])
        ids: dict[int, int] = {}
        decoder = backend.get_added_tokens_decoder()
        for token_id, name in zip(sorted(decoder), self._names, strict=True):
            token = decoder[token_id]
            renamed = tokenizers.AddedToken(
                name,
                single_word=token.single_word and name == token.content,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            beside.add_tokens([renamed])
            id_beside = beside.token_to_id(name)
            assert id_beside is not None
            ids[id_beside] = token_id
        return beside, ids


def _encode(backend: tokenizers.Tokenizer, text: str) -> list[int]:
    # The template writes the special tokens itself. The batch form releases the interpreter lock.
    [encoding] = backend.encode_batch_fast([text], add_special_tokens=False)
    return encoding.ids


def _writes(template: str, name: str) -> bool:
    """Whether a template's source has the name, or what is around a role in it."""
    if name in template:
        return True
    for role in TURN_ROLES:
        before, found, after = name.partition(role)
        if found and before and after and before in template and after in template:
            return True
    return False


def _has_structure(name: str, known: set[str]) -> bool:
    """Whether a token that is not special begins or ends something that a template wrote.

    Words do not. Nor does one of a pair such as <think> and </think>: it is around a part of what
    is said, and models write it themselves.
    """
    pair = _PAIR.fullmatch(name)
    if pair is not None:
        return not {f"<{pair[1]}>", f"</{pair[1]}>"} <= known
    return not name.isalnum()


def _name(index: int, kind: int = 0) -> str:
    """A text of reserved characters, none of which begins in the middle of another."""
    assert index < 16**_DIGITS
    digits = f"{index:0{_DIGITS}x}"
    return chr(0xFDD0 + kind) + "".join(chr(0xFDD2 + int(digit, 16)) for digit in digits)
