"""Finds the first of several stop strings in a text that arrives in pieces.

The search is an Aho-Corasick automaton (Aho and Corasick 1975). Its state is the longest suffix of
the text that could still become a stop string, and exactly that suffix must be held back.

Some tokens have no text of their own, such as the end of a turn. A stop string that holds what such
a token is called is found both ways: as text, and where the token itself comes. So the automaton
reads symbols: one for each character, and one for each such token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

_TOKEN = "token "
"""Marks the symbol of a token: longer than a character, however short the token's name is."""


class TokenNames:
    """The names of the tokens that have no text."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(name for name in names if name)
        self._lengths = sorted(set(map(len, self._names)), reverse=True)

    def symbols(self, string: str) -> list[str]:
        """The string's characters, the longest names from left to right as one symbol each."""
        symbols = []
        start = 0
        while start < len(string):
            candidates = (string[start : start + length] for length in self._lengths)
            name = next((name for name in candidates if name in self._names), None)
            symbols.append(string[start] if name is None else _TOKEN + name)
            start += 1 if name is None else len(name)
        return symbols


class StopStrings:
    """The automaton of a request's stop strings; none may be empty."""

    def __init__(self, strings: Sequence[str], names: TokenNames | None = None) -> None:
        assert all(strings), "an empty stop string"
        self._next: list[dict[str, int]] = [{}]
        self._fallback = [0]
        self.depth = [0]
        """Per state: how many characters of a stop string the text ends with."""
        self.match: list[tuple[str, int] | None] = [None]
        """Per state: the longest stop string that ends there, and its characters in the text."""
        for string in strings:
            self._add(string, string)
            if names is not None:
                self._add(string, names.symbols(string))
        self._link()

    def step(self, state: int, character: str) -> int:
        """The state after one more character. State 0 is the start."""
        return self._step(state, character, 0)

    def step_token(self, state: int, name: str) -> int:
        """The state after a token without text; the same if no stop string goes on with it."""
        return self._step(state, _TOKEN + name, state)

    def _step(self, state: int, symbol: str, otherwise: int) -> int:
        while True:
            following = self._next[state].get(symbol)
            if following is not None:
                return following
            if state == 0:
                return otherwise
            state = self._fallback[state]

    def _add(self, string: str, symbols: Iterable[str]) -> None:
        state = 0
        for symbol in symbols:
            following = self._next[state].get(symbol)
            if following is None:
                following = len(self._next)
                self._next[state][symbol] = following
                self._next.append({})
                self._fallback.append(0)
                self.depth.append(self.depth[state] + (len(symbol) == 1))
                self.match.append(None)
            state = following
        self.match[state] = (string, self.depth[state])

    def _link(self) -> None:
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            for symbol, following in self._next[state].items():
                fallback = self._step(self._fallback[state], symbol, 0)
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
            if self._strings.match[self._state] is not None:
                return self._certain(text[: index + 1])
        return self._certain(text)

    def push_token(self, name: str) -> str:
        """The same for a token that has no text but a name."""
        assert self.matched is None, "pushed after the match"
        self._state = self._strings.step_token(self._state, name)
        return self._certain(self._held)

    def flush(self) -> str:
        """The text that was held back, when no text follows."""
        held, self._held = self._held, ""
        self._state = 0
        return held

    def _certain(self, text: str) -> str:
        """What of a text is out of reach of the stop strings; the rest is held or cut off."""
        match = self._strings.match[self._state]
        if match is not None:
            self.matched, length = match
            self._held = ""
            return text[: len(text) - length]
        certain = len(text) - self._strings.depth[self._state]
        self._held = text[certain:]
        return text[:certain]
