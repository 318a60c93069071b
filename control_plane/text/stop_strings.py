"""Finds the first of several stop strings in a text that arrives in pieces.

The search is an Aho-Corasick automaton (Aho and Corasick 1975). The depth of its state is the
length of the longest suffix of the text that could still become a stop string, and exactly that
suffix must be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


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
    """The search in one text. The stop string that completes first wins, then the longest."""

    def __init__(self, strings: StopStrings) -> None:
        self._strings = strings
        self._state = 0
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The text that is now certain. It ends before the stop string when one has `matched`."""
        assert self.matched is None, "pushed after the match"
        held_count = len(self._held)
        text = self._held + text
        for index in range(held_count, len(text)):
            self._state = self._strings.step(self._state, text[index])
            match = self._strings.match[self._state]
            if match is not None:
                self.matched = match
                self._held = ""
                return text[: index + 1 - len(match)]
        certain = len(text) - self._strings.depth[self._state]
        self._held = text[certain:]
        return text[:certain]

    def flush(self) -> str:
        """The text that was held back, when no text follows."""
        held, self._held = self._held, ""
        self._state = 0
        return held
