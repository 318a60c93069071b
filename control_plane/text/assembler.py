"""One request's text: takes tokens, gives text, and decides when a stop string is complete."""

from __future__ import annotations

from collections.abc import Callable, Set

from control_plane.text.detokenizer import Detokenizer
from control_plane.text.stop_strings import StopMatcher


class TextAssembler:
    """Detokenizes, searches for stop strings, and gathers the text until it is drained.

    `hidden` tokens have no text. With a matcher, tokens are detokenized one at a time, because the
    token that completes a stop string is the last one that counts; `name_of` says what a hidden one
    is called, as a stop string may hold that.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        hidden: Set[int],
        name_of: Callable[[int], str],
        matcher: StopMatcher | None = None,
    ) -> None:
        self._detokenizer = detokenizer
        self._hidden = hidden
        self._name_of = name_of
        self._matcher = matcher
        self._text: list[str] = []

    @property
    def searches(self) -> bool:
        """Whether it looks for stop strings."""
        return self._matcher is not None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return None if self._matcher is None else self._matcher.matched

    def push(self, token_ids: list[int]) -> int | None:
        """Adds tokens. Returns how many of them it took to complete a stop string, or None."""
        if self._matcher is None:
            shown = [token_id for token_id in token_ids if token_id not in self._hidden]
            self._text.append(self._detokenizer.push(shown))
            return None
        for index, token_id in enumerate(token_ids):
            if token_id in self._hidden:
                self._text.append(self._matcher.push_token(self._name_of(token_id)))
            elif text := self._detokenizer.push((token_id,)):
                self._text.append(self._matcher.push(text))
            if self._matcher.matched is not None:
                return index + 1
        return None

    def finish(self) -> None:
        """No token follows: what was held back joins the text, unless a stop string ended it.

        Characters that the end leaves incomplete become U+FFFD, and are searched like all text.
        """
        if self.stop_string is not None:
            return
        tail = self._detokenizer.flush()
        if self._matcher is None:
            self._text.append(tail)
            return
        self._text.append(self._matcher.push(tail))
        if self._matcher.matched is None:
            self._text.append(self._matcher.flush())

    def skip(self, byte_count: int | None) -> int | None:
        """Drops the first bytes of UTF-8 of the text that was not drained; None: all of it.

        Returns how many it has where there are fewer, or where they end within a character; then
        nothing is dropped.
        """
        text = self.drain().encode()
        count = len(text) if byte_count is None else byte_count
        kept = text[count:]
        is_whole = count <= len(text) and (kept[:1] or b" ")[0] & 0xC0 != 0x80
        self._text.append((kept if is_whole else text).decode())
        return None if is_whole else len(text)

    def drain(self) -> str:
        """The text since the last drain."""
        text = "".join(self._text)
        self._text.clear()
        return text
