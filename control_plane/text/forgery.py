"""Tells the control tokens that a template writes from those that messages write.

A *control token* gives a chat its structure: every special token, and every other added token that
the template writes itself. In a message's role or content its name is text, however it comes about:
written out, or put together from several messages and the template's own words.

What a message wrote is known by rendering the chat twice: once as it is, and once with a mark in
place of each character of the messages that could begin or end a control token. The control tokens
of the second rendering are the template's own. Where the first has no others, that is all. Else the
two must agree but for the marks; if they do not, the template does something of its own with what
the message wrote, and nobody can tell what is whose.

Runs in the render process only, whose limits bound it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

RESERVED = "\ufdd0-\ufdef"
"""Noncharacters of Unicode, which texts do not have: what stands for something else here."""
_RESERVED = re.compile(f"[{RESERVED}]")
_MARK = "\ufdef"
TURN_ROLES = frozenset(
    ("system", "developer", "user", "human", "assistant", "model", "bot", "tool", "function")
) | {"ipython", "observation"}
"""Roles from which a template may make a control token (`'<|' + role + '|>'`)."""
_CODE = re.compile(r"\{[{%].*?[%}]\}", re.DOTALL)
_LITERAL = re.compile(r"""'([^'\\]{3,64})'|"([^"\\]{3,64})\"""")

Turn = tuple[str, str]
"""A message's role and content."""
Position = tuple[int, int, int]
"""Start and end of a control token in a text, and its place among the added tokens."""


class Guard:
    """Renders the chats of one template and says which control tokens are the template's own.

    `tokens` are the tokenizer's added tokens: name, whether it is a control token, and whether it
    is looked for in the normalized text.
    """

    def __init__(self, tokens: Sequence[tuple[str, bool, bool]], source: str) -> None:
        self._indices = {name: index for index, (name, control, _) in enumerate(tokens) if control}
        names = self._indices.keys()
        # As the tokenizer matches them: first in the text as it is, then in what is left.
        self._patterns = [
            re.compile(_any_of(name for name, _, when in tokens if when is normalized))
            for normalized in (False, True)
        ]
        self._name = re.compile(_any_of(names))
        self._all_names = "\0".join(names)
        self._longest = max(map(len, names), default=0)
        self._marks = {ord(name[end]): _MARK for name in names for end in (0, -1)}
        edges = _any_of(map(chr, self._marks))
        self._edge = re.compile(edges)
        others = {name for name, control, _ in tokens if not control}
        kept = {
            text
            for text in _literals(source) | others
            if self._edge.search(text) is not None and _is_harmless(text, names)
        }
        self._whole = re.compile(_any_of(names | kept))
        self._markable = re.compile(f"({_any_of(kept)})|{_any_of(names)}|{edges}")

    def render(
        self, messages: Sequence[Turn], render: Callable[[Sequence[Turn]], str]
    ) -> dict[str, object]:
        """The reply to one conversation: its text, and `own`, the template's control tokens in it.

        `written`: index and field of the first message that has others. `unclear`: true, in place
        of a text, when they can't be told apart.
        """
        text = render(messages)
        found = self._find(text)
        plain: dict[str, object] = {"text": text, "own": found}
        marked = [self._mark(turn) for turn in messages]
        if all(turn is before for turn, before in zip(marked, messages, strict=True)):
            return plain
        unclear = {"written": self._first_written(messages, marked), "unclear": True}
        try:
            beside = render(marked)
        except MemoryError:
            raise
        except Exception:  # a template's own, of any kind: it reads what the marks changed
            return unclear
        own = self._find(beside)
        if [index for _, _, index in own] == [index for _, _, index in found]:
            return plain
        if not _agree(text, beside) or _RESERVED.search(text):
            return unclear
        return {"text": text, "own": own, "written": unclear["written"]}

    def _find(self, text: str) -> list[Position]:
        """Where the tokenizer finds control tokens, in order."""
        return [
            (start, end, self._indices[name])
            for start, end in self._find_added(text, 0, len(text), 0)
            if (name := text[start:end]) in self._indices
        ]

    def _find_added(self, text: str, start: int, end: int, stage: int) -> Iterator[tuple[int, int]]:
        if stage == len(self._patterns):
            return
        for match in self._patterns[stage].finditer(text, start, end):
            yield from self._find_added(text, start, match.start(), stage + 1)
            yield match.span()
            start = match.end()
        yield from self._find_added(text, start, end, stage + 1)

    def _mark(self, turn: Turn) -> Turn:
        """The turn with marks; the same object when there is nothing to mark."""
        before, content = turn[0], self._mark_text(turn[1])
        role = before if before in TURN_ROLES else self._mark_text(before)
        return turn if role is before and content is turn[1] else (role, content)

    def _mark_text(self, text: str) -> str:
        if self._edge.search(text) is not None:
            if self._whole.search(text) is None:
                return text.translate(self._marks)
            return self._markable.sub(self._mark_match, text)
        inside = text.strip()
        if inside and len(inside) <= self._longest and inside in self._all_names:
            # The template itself may write what comes before and after it.
            return text.replace(inside[0], _MARK, 1)
        return text

    def _mark_match(self, match: re.Match[str]) -> str:
        kept = match[1]
        return match[0].translate(self._marks) if kept is None else kept

    def _first_written(self, messages: Sequence[Turn], marked: Sequence[Turn]) -> tuple[int, str]:
        """The first field that has a control token's name, else the first with a part of one."""
        part: tuple[int, str] | None = None
        for index, (turn, after) in enumerate(zip(messages, marked, strict=True)):
            for text, other, field in zip(turn, after, ("role", "content"), strict=True):
                if text is not other:
                    part = part or (index, field)
                    if self._name.search(text) is not None:
                        return index, field
        return part or (0, "content")


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


def _any_of(texts: Iterable[str]) -> str:
    """A pattern of any of them, the longest that is there; of none, one that never matches.

    What several begin with is there once, so that looking costs the same for one and thousands.
    """
    ordered = sorted(filter(None, texts))
    return _behind(ordered, 0) if ordered else "(?!)"


def _behind(texts: Sequence[str], start: int) -> str:
    """A pattern of what comes in sorted texts behind the `start` characters that all share."""
    first, last = texts[0], texts[-1]
    end = start
    while end < len(first) and first[end] == last[end]:
        end += 1
    shared = re.escape(first[start:end])
    longer = [text for text in texts if len(text) > end]
    if not longer:
        return shared
    groups = [list(group) for _, group in groupby(longer, key=lambda text: text[end])]
    rest = "|".join(_behind(group, end) for group in groups)
    return f"{shared}(?:{rest}){'?' if len(first) == end else ''}"


def _literals(source: str) -> set[str]:
    """The quoted texts in a template's code, those that hold a quote or a backslash left out."""
    return {
        text
        for code in _CODE.findall(source)
        for pair in _LITERAL.findall(code)
        for text in pair
        if text
    }


def _is_harmless(text: str, names: Iterable[str]) -> bool:
    """Whether no control token can begin, end or hide in a text that a template looks for.

    A template that splits a turn at `</think>` must find it in the marked one, too.
    """
    return not any(
        text in name or name in text or _overlap(text, name) or _overlap(name, text)
        for name in names
    )


def _overlap(first: str, second: str) -> bool:
    """Whether an end of the first is a beginning of the second."""
    return any(second.startswith(first[-size:]) for size in range(1, min(len(first), len(second))))
