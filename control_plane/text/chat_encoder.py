"""Chats as token ids, so that no message can write a control token.

A *control token* gives a chat its structure: every special token, and every other added token that
the template writes itself. In a message's role or content its text is text, however it comes about:
written out, or put together from several messages and the template's own words.

What a message wrote is known by rendering the chat twice: once as it is, and once with a mark in
place of each character of the messages that could begin or end a control token. The control tokens
of the second rendering are the template's own. Where the first has no others, it is tokenized as it
is. Else the two must agree but for the marks, and the template's own tokens are put in by names
that no text can have (see ControlTokens.encode).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from control_plane.text.chat_template import ChatMessage, ChatTemplate
from control_plane.text.control_tokens import (
    RESERVED,
    TURN_ROLES,
    ControlTokens,
    Found,
    alternatives,
)
from control_plane.text.errors import ControlTokenWritten, TemplateFailed
from control_plane.text.tokenizer import Tokenizer

_MARK = "\ufdef"
"""One of Unicode's noncharacters, which texts do not have."""
_CODE = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_LITERAL = re.compile(r"""'([^'\\]{3,64})'|"([^"\\]{3,64})\"""")

Render = Callable[[Sequence[ChatMessage]], str]


class ChatEncoder:
    """Encodes the chats of one model. Thread-safe; takes some milliseconds to make.

    `special_tokens` are the texts of those that the model's files name.
    """

    def __init__(
        self, tokenizer: Tokenizer, special_tokens: frozenset[str], template: ChatTemplate
    ) -> None:
        self._tokenizer = tokenizer
        self._control = ControlTokens(tokenizer.backend, special_tokens, template.source)
        texts = self._control.texts
        self._marks = {ord(text[end]): _MARK for text in texts for end in (0, -1)}
        edges = alternatives(map(chr, self._marks))
        self._edge = re.compile(edges)
        kept = {
            text
            for text in _literals(template.source) | self._control.others
            if self._edge.search(text) is not None and _is_harmless(text, texts)
        }
        self._whole = re.compile(alternatives(texts | kept))
        self._markable = re.compile(f"({alternatives(kept)})|{alternatives(texts)}|{edges}")

    def encode(self, messages: Sequence[ChatMessage], render: Render) -> list[int]:
        """Token ids of the rendered chat. Blocks while `render` does, once or twice.

        Raises what `render` raises, and ControlTokenWritten when the template does something of its
        own with a control token's text, or the vocabulary has no other way to write it.
        """
        rendered = render(messages)
        marked = [self._mark(turn) for turn in messages]
        found = self._control.find(rendered)
        own = found
        if any(turn is not before for turn, before in zip(marked, messages, strict=True)):
            try:
                beside = render(marked)
            except TemplateFailed:
                raise self._written(messages, marked) from None
            own = self._control.find(beside)
            if [token.text for token in own] != [token.text for token in found]:
                if not _agree(rendered, beside) or RESERVED.search(rendered):
                    raise self._written(messages, marked)
                return self._encode_apart(rendered, own, messages, marked)
        ids = self._tokenizer.encode(rendered, add_special_tokens=False)
        if self._control.normalized and self._control.count(ids) > len(own):
            # What the tokenizer's normalizer made into a control token was text.
            return self._encode_apart(rendered, found, messages, marked)
        return ids

    def _encode_apart(
        self,
        rendered: str,
        own: Sequence[Found],
        messages: Sequence[ChatMessage],
        marked: Sequence[ChatMessage],
    ) -> list[int]:
        ids = self._control.encode(rendered, own)
        if ids is None:
            raise self._written(messages, marked)
        return ids

    def _mark(self, turn: ChatMessage) -> ChatMessage:
        """The turn with marks; the same object when there is nothing to mark."""
        role, content = turn.role, self._mark_text(turn.content)
        if role not in TURN_ROLES:
            role = self._mark_text(role)
        if role is turn.role and content is turn.content:
            return turn
        return ChatMessage(role, content)

    def _mark_text(self, text: str) -> str:
        if self._edge.search(text) is not None:
            if self._whole.search(text) is None:
                return text.translate(self._marks)
            return self._markable.sub(self._mark_match, text)
        inside = text.strip()
        if inside and any(inside in token for token in self._control.texts):
            # The template itself may write what comes before and after it.
            return text.replace(inside[0], _MARK, 1)
        return text

    def _mark_match(self, match: re.Match[str]) -> str:
        kept = match[1]
        return match[0].translate(self._marks) if kept is None else kept

    def _written(
        self, messages: Sequence[ChatMessage], marked: Sequence[ChatMessage]
    ) -> ControlTokenWritten:
        """Names the first field that has a control token's text, else the first with a part."""
        part: tuple[int, str] | None = None
        for index, (turn, after) in enumerate(zip(messages, marked, strict=True)):
            for name in ("role", "content"):
                text = getattr(turn, name)
                if any(token in text for token in self._control.texts):
                    return ControlTokenWritten(index, name)
                if part is None and text is not getattr(after, name):
                    part = index, name
        return ControlTokenWritten(*(part or (0, "content")))


def _agree(rendered: str, beside: str) -> bool:
    """Whether the second is the first with marks in place of some characters."""
    if len(rendered) != len(beside):
        return False
    start = 0
    for piece in beside.split(_MARK):
        if not rendered.startswith(piece, start):
            return False
        start += len(piece) + 1
    return True


def _literals(source: str) -> set[str]:
    """The quoted texts in a template's code, those that hold a quote or a backslash left out."""
    return {
        text
        for code in _CODE.findall(source)
        for pair in _LITERAL.findall(code)
        for text in pair
        if text
    }


def _is_harmless(text: str, tokens: frozenset[str]) -> bool:
    """Whether no control token can begin, end or hide in a text that a template looks for.

    A template that splits a turn at `</think>` must find it in the marked one, too.
    """
    return not any(
        text in token or token in text or _overlap(text, token) or _overlap(token, text)
        for token in tokens
    )


def _overlap(first: str, second: str) -> bool:
    """Whether an end of the first is a beginning of the second."""
    return any(second.startswith(first[-size:]) for size in range(1, min(len(first), len(second))))
