"""The token with which a chat template ends what the assistant says.

A model that was trained on such chats ends its answers with it, whether or not its files name it as
an end of sequence.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from control_plane.text.chat_template import ChatMessage

_ASKED, _SAID, _ADDED = "Winter", "Spring", "Summer"
SAMPLE_CHAT = (
    ChatMessage("user", _ASKED),
    ChatMessage("assistant", _SAID),
    ChatMessage("user", _ADDED),
)
"""What to render for `find_turn_end`."""


def find_turn_end(rendered: str, tokens: Collection[str]) -> str | None:
    """The one of the tokenizer's added `tokens` that follows the assistant's words, or None.

    Only white space may stand between. The token with which a user's turn begins is no end: it
    follows where a template ends a turn with nothing of its own.
    """
    asked, said = rendered.find(_ASKED), rendered.find(_SAID)
    there = [token for token in tokens if token.strip() and token in rendered]
    if not there or not 0 <= asked < said:
        return None
    # The longest first, as one token's text may begin another's.
    names = "|".join(map(re.escape, sorted(there, key=len, reverse=True)))
    end = re.compile(rf"\s*({names})").match(rendered, said + len(_SAID))
    if end is None:
        return None
    # With what the turn of a user begins, unless that is text.
    begin = re.findall(names, rendered[:asked])[-1:]
    return None if [end[1]] == begin else end[1]
