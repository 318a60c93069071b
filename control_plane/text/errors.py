"""What the text layer refuses. The tree:

TextError
├── ModelFilesInvalid   a file that text work needs is missing or unusable: at start only
├── TextTooLong         a text is longer than the limit, which the message quotes
├── TemplateFailed      the chat template refused the messages, broke, or cost too much
├── ControlTokenWritten a message's text can't be told from a control token of the model
├── NoChatTemplate      the model has none that can be used
└── TextBusy            too much text work waits: try again after `retry_after` seconds

Messages never hold what a client sent.
"""

from __future__ import annotations

from control_plane.text.chat_template import Written


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


class ControlTokenWritten(TextError):
    """A message has a control token's text, and there is no way to take it as text.

    `written` says where; None: it is not known.
    """

    def __init__(self, written: Written | None) -> None:
        super().__init__(
            "has the text of a token that gives this model's chats their structure, and it can't be"
            " taken as text here"
        )
        self.written = written


class NoChatTemplate(TextError):
    """The model has no chat template, or one that does not compile; the message says which."""


class TextBusy(TextError):
    """The queue of text work is full."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("too much text work is waiting")
        self.retry_after = retry_after
