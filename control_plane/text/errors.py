"""What the text layer refuses. The tree:

TextError
├── ModelFilesInvalid   the model's folder lacks or garbles what text work needs: at start only
├── TextTooLong         a text is longer than will be looked at: quotes the limit
├── TemplateFailed      the chat template refused the messages, broke, or cost too much
├── NoChatTemplate      the model has none
└── TextBusy            too much text work waits: try again after `retry_after` seconds

Messages never hold what a client sent.
"""

from __future__ import annotations


class TextError(Exception):
    """Base of what the text layer refuses."""


class ModelFilesInvalid(TextError):
    """A file of the model's folder is missing or can't be used; the message names it."""


class TextTooLong(TextError):
    """A text has more characters than the limit."""

    def __init__(self, limit: int, length: int | None = None) -> None:
        counted = "more" if length is None else f"{length}"
        super().__init__(f"at most {limit} characters are allowed, there are {counted}")
        self.limit = limit


class TemplateFailed(TextError):
    """The chat template did not render these messages."""


class NoChatTemplate(TextError):
    """The model has no chat template."""


class TextBusy(TextError):
    """The queue of text work is full."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("too much text work is waiting")
        self.retry_after = retry_after
