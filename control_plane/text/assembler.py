"""One request's text: takes tokens, gives text, and decides when a stop string is complete."""

from __future__ import annotations

from control_plane.text.detokenizer import Detokenizer
from control_plane.text.stop_strings import StopMatcher


class TextAssembler:
    """Detokenizes, searches for stop strings, and gathers the text until it is drained.

    With a matcher, tokens are detokenized one at a time, because the token that completes a stop
    string is the last one that counts.
    """

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher | None = None) -> None:
        self._detokenizer = detokenizer
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
            self._text.append(self._detokenizer.push(token_ids))
            return None
        for index, token_id in enumerate(token_ids):
            text = self._detokenizer.push((token_id,))
            if text:
                self._text.append(self._matcher.push(text))
                if self._matcher.matched is not None:
                    return index + 1
        return None

    def finish(self) -> None:
        """No token follows: what was held back joins the text, unless a stop string ended it.

        Incomplete characters at the very end are not searched. They become U+FFFD only because the
        text ends there.
        """
        if self.stop_string is not None:
            return
        tail = self._detokenizer.flush()
        if self._matcher is not None:
            self._text.append(self._matcher.flush())
        self._text.append(tail)

    def drain(self) -> str:
        """The text since the last drain."""
        text = "".join(self._text)
        self._text.clear()
        return text
