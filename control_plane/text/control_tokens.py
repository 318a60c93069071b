"""The tokens that give a chat its structure, and a tokenizer that knows them by other names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import tokenizers

RESERVED = re.compile("[\ufdd0-\ufdef]")
"""Noncharacters of Unicode, which texts do not have: what stands for something else here."""
TURN_ROLES = frozenset(
    ("system", "developer", "user", "human", "assistant", "model", "bot", "tool", "function")
) | {"ipython", "observation"}
"""Roles from which a template may make a control token (`'<|' + role + '|>'`)."""
_PAIR = re.compile(r"</?(\w+)>")
_DIGITS = 4


@dataclass(frozen=True, slots=True)
class Found:
    """A control token in a text: text[start:end] is `text`."""

    start: int
    end: int
    text: str


class ControlTokens:
    """Those of one tokenizer. Thread-safe.

    `named` are the texts of the special tokens that the model's files name, `template` is the
    source of its chat template.
    """

    def __init__(self, backend: tokenizers.Tokenizer, named: frozenset[str], template: str) -> None:
        decoder = backend.get_added_tokens_decoder()
        added = [decoder[token_id] for token_id in sorted(decoder)]
        known = {token.content for token in added}
        control = [
            token
            for token in added
            if not token.content.isspace()
            and (
                token.special
                or token.content in named
                or (_writes(template, token.content) and _has_structure(token.content, known))
            )
        ]
        self.texts = frozenset(token.content for token in control)
        self.others = known - self.texts
        """The texts of the added tokens that are no control tokens."""
        self.normalized = backend.normalizer is not None and any(t.normalized for t in control)
        """Whether some are looked for in the normalized text, so that others become them."""
        self._ids = frozenset(
            token_id for token_id, t in decoder.items() if t.content in self.texts
        )
        # As the library matches them: first those of the text as it is, then of what is left.
        self._patterns = [
            re.compile(alternatives(t.content for t in added if t.normalized is normalized))
            for normalized in (False, True)
        ]
        self._names = {token.content: _name(index) for index, token in enumerate(control)}
        self._apart, self._ids_of_apart = self._make_apart(backend, added)

    def find(self, text: str) -> list[Found]:
        """Where the tokenizer finds control tokens, in order."""
        return [found for found in self._find(text, 0, len(text), 0) if found.text in self.texts]

    def count(self, token_ids: Sequence[int]) -> int:
        """How many of the tokens are control tokens."""
        return sum(map(self._ids.__contains__, token_ids))

    def encode(self, text: str, own: Sequence[Found]) -> list[int] | None:
        """Token ids of a text in which only `own` are control tokens; the others' texts are text.

        None: the vocabulary has no way to write one of them but the token. `text` has no characters
        that are reserved.
        """
        parts: list[str] = []
        end = 0
        for found in own:
            parts += (text[end : found.start], self._names[found.text])
            end = found.end
        parts.append(text[end:])
        [encoding] = self._apart.encode_batch_fast(["".join(parts)], add_special_tokens=False)
        token_ids = [self._ids_of_apart.get(token_id, token_id) for token_id in encoding.ids]
        return token_ids if self.count(token_ids) == len(own) else None

    def _find(self, text: str, start: int, end: int, stage: int) -> Iterator[Found]:
        if stage == len(self._patterns):
            return
        for match in self._patterns[stage].finditer(text, start, end):
            yield from self._find(text, start, match.start(), stage + 1)
            yield Found(match.start(), match.end(), match[0])
            start = match.end()
        yield from self._find(text, start, end, stage + 1)

    def _make_apart(
        self, backend: tokenizers.Tokenizer, added: Sequence[tokenizers.AddedToken]
    ) -> tuple[tokenizers.Tokenizer, dict[int, int]]:
        """The tokenizer that knows control tokens by their names here, and their ids by its own.

        It shares the vocabulary, so it costs little. What its vocabulary lacks gets an id behind
        the vocabulary's size, where none of the vocabulary's own may be.
        """
        apart = tokenizers.Tokenizer(backend.model)
        if backend.normalizer is not None:
            apart.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            apart.pre_tokenizer = backend.pre_tokenizer
        size = apart.get_vocab_size()
        free = size
        while any(
            backend.model.id_to_token(token_id) is not None
            for token_id in range(free, free + len(added))
        ):
            free += 1
        apart.add_tokens([_name(index, kind=1) for index in range(free - size)])
        ids: dict[int, int] = {}
        for token in added:
            name = self._names.get(token.content, token.content)
            other = tokenizers.AddedToken(
                name,
                single_word=token.single_word and name == token.content,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
            apart.add_tokens([other])
            token_id, other_id = backend.token_to_id(token.content), apart.token_to_id(name)
            assert token_id is not None
            assert other_id is not None
            ids[other_id] = token_id
        return apart, ids


def alternatives(texts: Iterable[str]) -> str:
    """A pattern of any of them, the longest first; of none, one that never matches."""
    return "|".join(map(re.escape, sorted(texts, key=len, reverse=True))) or "(?!)"


def _writes(template: str, text: str) -> bool:
    """Whether a template's source has the text, or what is around a role in it."""
    if text in template:
        return True
    for role in TURN_ROLES:
        before, found, after = text.partition(role)
        if found and before and after and before in template and after in template:
            return True
    return False


def _has_structure(text: str, known: set[str]) -> bool:
    """Whether a token that is not special begins or ends something that a template wrote.

    Words do not. Nor does one of a pair such as <think> and </think>: it is around a part of what
    is said, and models write it themselves.
    """
    pair = _PAIR.fullmatch(text)
    if pair is not None:
        return not {f"<{pair[1]}>", f"</{pair[1]}>"} <= known
    return not text.isalnum()


def _name(index: int, kind: int = 0) -> str:
    """A text of reserved characters, none of which begins in the middle of another."""
    assert index < 16**_DIGITS
    digits = f"{index:0{_DIGITS}x}"
    return chr(0xFDD0 + kind) + "".join(chr(0xFDD2 + int(digit, 16)) for digit in digits)
