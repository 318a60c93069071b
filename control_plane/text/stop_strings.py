"""Finds the first of several stop strings in a text that arrives in pieces.

The search is an Aho-Corasick automaton (Aho and Corasick 1975). Its state is the longest suffix of
the text that could still become a stop string, and exactly that suffix must be held back.

Some tokens have no text of their own, such as the end of a turn. A stop string is looked for in the
text, and in the text with the names of such tokens written out: one that holds a name is found
where the token comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum


class StopStrings:
    """The automaton of a request's stop strings; none may be empty."""

    def __init__(self, strings: Sequence[str]) -> None:
        assert all(strings), "an empty stop string"
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        """Per state: how many characters of a stop string the text ends with."""
        self.match: list[str | None] = [None]
        """Per state: the longest stop string that ends there."""
        self.longest = max(map(len, strings), default=0)
        for string in strings:
            self._add(string)
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character. State 0 is the start."""
        while True:
            following = self._next[state].get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = self._fallback[state]

    def suffixes(self, state: int) -> Iterator[int]:
        """The states of all that the text ends with, the longest first and the start last."""
        yield state
        while state != 0:
            state = self._fallback[state]
            yield state

    def _add(self, string: str) -> None:
        state = 0
        for character in string:
            following = self._next[state].get(character)
            if following is None:
                following = len(self._next)
                self._next[state][character] = following
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + 1)
                self.match.append(None)
            state = following
        self.match[state] = string

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, following in self._next[state].items():
                fallback = self.step(self._fallback[state], character)
                self._fallback[following] = fallback
                if self.match[following] is None:
                    self.match[following] = self.match[fallback]
                waiting.append(following)


class StopMatcher:
    """The search in one text. The stop string that completes first wins, then the longest.

    Of two that are equally long, one that is all in the text beats one that needs a name.
    """

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""
        self._written: _WrittenText | None = None
        """From the first token without text on."""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain. It ends before the stop string when one has `matched`."""
        assert self.matched is None, "pushed after the match"
        held_count = len(self._held)
        text = self._held + text
        for index in range(held_count, len(text)):
            self._state = self._strings.step(self._state, text[index])
            match = self._strings.match[self._state]
            length = 0 if match is None else len(match)
            if self._written is not None:
                self._written.add(text[index])
                written, shown = self._written.match()
                if written is not None and len(written) > length:
                    match, length = written, shown
            if match is not None:
                return self._stop(match, text[: index + 1 - length])
        return self._hold(text)

    def push_token(self, name: str) -> str:
        """The same for a token that has no text, only a name."""
        assert self.matched is None, "pushed after the match"
        if self._written is None:
            self._written = _WrittenText(self._strings, self._state)
        self._written.add_name(name)
        match, shown = self._written.match()
        if match is not None:
            return self._stop(match, self._held[: len(self._held) - shown])
        return self._hold(self._held)

    def flush(self) -> str:
        """The text that was held back, when no text follows."""
        held, self._held = self._held, ""
        self._state = 0
        self._written = None
        return held

    def _stop(self, match: str, before: str) -> str:
        self.matched = match
        self._held = ""
        return before

    def _hold(self, text: str) -> str:
        held = self._strings.depth[self._state]
        if self._written is not None:
            held = max(held, self._written.reach())
        certain = len(text) - held
        self._held = text[certain:]
        return text[:certain]


class _Mark(Enum):
    """What a written character is."""

    SHOWN = 1
    NAME_BEGINS = 2
    NAME_GOES_ON = 3


class _WrittenText:
    """The end of the text with the names of tokens written out, as far as stop strings reach.

    A stop string holds a name whole or not at all: what is part of one is no text of the model's.
    """

    def __init__(self, strings: StopStrings, state: int) -> None:
        """Goes on from the state of a text without such tokens."""
        self._strings = strings
        self._state = state
        self._marks = deque([_Mark.SHOWN] * strings.depth[state], maxlen=strings.longest)

    def add(self, character: str, mark: _Mark = _Mark.SHOWN) -> None:
        self._state = self._strings.step(self._state, character)
        self._marks.append(mark)

    def add_name(self, name: str) -> None:
        mark = _Mark.NAME_BEGINS
        for character in name:
            self.add(character, mark)
            mark = _Mark.NAME_GOES_ON

    def match(self) -> tuple[str | None, int]:
        """The longest stop string that ends here, and how many of its characters are shown."""
        if self._strings.match[self._state] is None:
            return None, 0
        for depth, match in self._suffixes():
            if match is not None and len(match) == depth:
                return match, self._shown(depth)
        return None, 0

    def reach(self) -> int:
        """How many of the characters shown last may be part of a stop string."""
        return next((self._shown(depth) for depth, _ in self._suffixes()), 0)

    def _suffixes(self) -> Iterator[tuple[int, str | None]]:
        """Per suffix that begins a stop string: its length, and what ends with it."""
        for state in self._strings.suffixes(self._state):
            depth = self._strings.depth[state]
            if depth and self._marks[-depth] is not _Mark.NAME_GOES_ON:
                yield depth, self._strings.match[state]

    def _shown(self, depth: int) -> int:
        marks = self._marks
        return sum(marks[-index] is _Mark.SHOWN for index in range(1, depth + 1))
