"""What a running generation is, whichever client reads it.

Its stream may break. One that had begun is resumed by another stream, which goes on behind what has
come; one that had not is tried again as it was.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import grpc

from twinplane.client.failures import Failures
from twinplane.client.responses import GenerationFold
from twinplane.client.retry import Attempts
from twinplane.client.values import Delta
from twinplane.errors import InvalidRequest, ModelNotFound, TwinplaneError, WrongServer
from twinplane.inference.v1 import inference_pb2 as pb


class _Cancellable(Protocol):
    def cancel(self) -> object: ...


_Stream = TypeVar("_Stream", bound=_Cancellable)


class BaseGeneration(Generic[_Stream]):
    """One generation, and the stream of its current attempt, which a subclass reads.

    `open_stream` starts a call, in so many seconds. With `resumes`, one that breaks is resumed. The
    properties are None until the first message has arrived.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        open_stream: Callable[[pb.GenerateRequest, float | None], _Stream],
        attempts: Attempts,
        failures: Failures,
        *,
        resumes: bool,
    ) -> None:
        self._fold = GenerationFold()
        self._failures = failures
        self._request = request
        self._open_stream = open_stream
        self._attempts = attempts
        self._resumes = resumes
        self._broken_by: TwinplaneError | None = None
        """What broke the last stream; None once another one goes on."""
        self._cancelled = False
        self._stream = open_stream(request, attempts.remaining())

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

    def _apply(self, message: pb.GenerateResponse) -> Delta | None:
        """Takes in the next message; returns its delta if it carries one."""
        if self._attempts.is_resuming:
            self._attempts.went_on()
            self._broken_by = None
        return self._fold.apply(message)

    def _wait_or_raise(self, failure: grpc.RpcError) -> float | None:
        """Returns the seconds to wait before `_reopen`; None: all has come but the status. Raises
        the failure's error where no attempt may follow, e.g. because the caller has cancelled.
        """
        fold, attempts = self._fold, self._attempts
        if fold.started is None and not self._cancelled:
            return self._failures.wait_or_raise(attempts, failure)
        if fold.finished is not None and not self._cancelled:
            return None
        error = self._failures.error_of(failure, attempts.timeout, cancelled=self._cancelled)
        if self._resumes and fold.can_resume and not self._cancelled:
            wait = attempts.wait_to_resume(error)
            if wait is not None:
                self._broken_by = self._broken_by or error
                return wait
            error = self._seen_by_caller(error)
        raise fold.broken(error) from failure

    def _seen_by_caller(self, error: TwinplaneError) -> TwinplaneError:
        """What is raised for an error that ends the attempts to resume.

        Where the request to resume was refused, the caller's own is not to blame: it broke.
        """
        broken_by = self._broken_by
        if broken_by is None or not isinstance(error, InvalidRequest | ModelNotFound | WrongServer):
            return error
        return type(broken_by)(
            f"{broken_by}; it can't be resumed: {error}",
            reason=broken_by.reason,
            metadata=broken_by.metadata,
            retry_after=broken_by.retry_after,
        )

    def _reopen(self) -> None:
        """Starts the next attempt."""
        request = self._request
        if self._fold.started is not None:
            request = self._fold.resuming(request)
        try:
            self._stream = self._open_stream(request, self._attempts.remaining())
        except TwinplaneError as error:  # the client was closed during the wait
            raise self._fold.broken(error) from None
        if self._cancelled:  # during the wait
            self._stream.cancel()
