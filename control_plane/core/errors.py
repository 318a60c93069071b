"""Why the core refuses a request. The tree:

CoreError
├── DuplicateRequest     the id is running already
├── QueueFull            too many wait: try again after `retry_after` seconds
├── RequestTooLong       can never fit: quotes the limit
└── ResultMismatch       a step result that no plan asked for: our bug or the worker's
"""

from __future__ import annotations


class CoreError(Exception):
    """Base of what the core refuses."""


class DuplicateRequest(CoreError):
    """A request of this id is not finished."""


class QueueFull(CoreError):
    """The waiting queue is at its limit."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestTooLong(CoreError):
    """The request could not be held even by an empty pool."""


class ResultMismatch(CoreError):
    """A result does not belong to the oldest plan in flight."""
