"""Why the core refuses. The tree:

CoreError
├── QueueFull            too many run and wait: try again after `retry_after` seconds
├── RequestTooLong       can never fit: quotes the limit
└── ResultMismatch       a step result that no plan asked for: our bug or the worker's
"""

from __future__ import annotations


class CoreError(Exception):
    """Base of what the core refuses."""


class QueueFull(CoreError):
    """As many sequences run or wait as may."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTooLong(CoreError):
    """The request could not be held even by an empty pool."""


class ResultMismatch(CoreError):
    """A result does not belong to the oldest plan in flight.

    `story` says what happened last to the sequences of that plan, one event a line, for the log.
    """

    def __init__(self, message: str, story: list[str]) -> None:
        super().__init__(message)
        self.story = story
