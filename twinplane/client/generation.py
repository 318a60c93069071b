"""What a running generation is, whichever client reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import grpc

from twinplane.client.failures import Failures
from twinplane.client.responses import GenerationFold
from twinplane.client.retry import Attempts


class _Cancellable(Protocol):
    def cancel(self) -> object: ...


_Stream = TypeVar("_Stream", bound=_Cancellable)


class BaseGeneration(Generic[_Stream]):
    """One generation, and the stream of its current attempt, which a subclass reads.

    `open_stream` starts the call; its argument is the seconds left. The properties are None until
    the first message has arrived.
    """

    def __init__(
        self,
        open_stream: Callable[[float | None], _Stream],
        attempts: Attempts,
        failures: Failures,
    ) -> None:
        self._fold = GenerationFold()
        self._failures = failures
        self._open_stream = open_stream
        self._attempts = attempts
        self._cancelled = False
        self._stream = open_stream(attempts.remaining())

    @property
    def request_id(self) -> str | None:
        """The request's name in the server's logs."""
        return self._fold.started.request_id if self._fold.started else None

    @property
    def model(self) -> str | None:
        """The model that answers."""
        return self._fold.started.model if self._fold.started else None

    @property
    def seed(self) -> int | None:
        """The seed of the draws: the same request with it gives the same tokens."""
        return self._fold.started.seed if self._fold.started else None

    @property
    def prompt_token_count(self) -> int | None:
        """Tokens of the prompt."""
        return self._fold.started.prompt_token_count if self._fold.started else None

    def cancel(self) -> None:
        """Ends the generation on the server; without effect once it is over."""
        self._cancelled = True
        self._stream.cancel()

    def _wait_or_raise(self, failure: grpc.RpcError) -> float:
        """Returns the seconds to wait before `_reopen`. Raises the failure's error where no attempt
        may follow, e.g. because the caller has seen a message already, or has cancelled."""
        if self._fold.started is not None or self._cancelled:
            timeout = self._attempts.timeout
            error = self._failures.error_of(failure, timeout, cancelled=self._cancelled)
            raise self._fold.broken(error) from failure
        return self._failures.wait_or_raise(self._attempts, failure)

    def _reopen(self) -> None:
        """Starts the next attempt."""
        self._stream = self._open_stream(self._attempts.remaining())
        if self._cancelled:  # during the wait
            self._stream.cancel()
