"""The blocking client."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from twinplane.client.channel import OPTIONS, channel_credentials
from twinplane.client.failures import wait_or_raise
from twinplane.client.generation import BaseGeneration
from twinplane.client.options import GenerateOptions, with_options_documented
from twinplane.client.requests import detokenize_request, generate_request, tokenize_request
from twinplane.client.responses import served_models
from twinplane.client.retry import Attempts, RetryPolicy
from twinplane.client.values import (
    DEFAULT_ADDRESS,
    Delta,
    GenerationResult,
    Message,
    Prompt,
    ServedModel,
    TlsCredentials,
)
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc
from twinplane.paths import expand_address

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class _Stream(Protocol):
    def __next__(self) -> pb.GenerateResponse: ...
    def cancel(self) -> object: ...


class Client:
    """Talks to a control plane; any number of threads may share one.

        with Client() as client:
            for delta in client.generate("Once upon a time", max_tokens=32):
                print(delta.text, end="", flush=True)

    `address` is host:port, unix:/path, or any gRPC target; `unix:~/path` is below the home folder
    (NoHomeFolder, a ValueError, where there is none). Without `credentials` the connection is
    plain, which is meant for loopback. `timeout` in seconds holds for every call that names none.
    Every method raises subclasses of TwinplaneError. `clock`, `sleep` and `jitter` are for tests.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: TlsCredentials | None = None,
        timeout: float | None = None,
        retry: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter or random.Random().random
        address = expand_address(address)
        self._channel = (
            grpc.insecure_channel(address, OPTIONS)
            if credentials is None
            else grpc.secure_channel(address, channel_credentials(credentials), OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def close(self) -> None:
        """Closes the connection; generations that run are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @with_options_documented
    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Starts a generation; iterate over it for its deltas, or ask it for its `result()`.

        `prompt` is plain text, token ids taken as they are, or a conversation of Message. `timeout`
        in seconds bounds the whole generation.

        Raises InvalidRequest and TypeError here for what no message can carry; what the server
        refuses is raised when the generation is read.
        """
        request = generate_request(prompt, options)

        def open_stream(remaining: float | None) -> _Stream:
            stream: _Stream = self._stub.Generate(request, timeout=remaining)
            return stream

        return Generation(open_stream, self._attempts(timeout), self._sleep)

    def tokenize(
        self,
        text: str | Sequence[Message],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """The token ids of a text, or of a conversation in the model's chat template.

        Without `add_special_tokens`, the special tokens that the model puts around plain text are
        left out. Those of a conversation come from its template; to leave them out is refused with
        InvalidRequest.
        """
        request = tokenize_request(text, model=model, add_special_tokens=add_special_tokens)
        response: pb.TokenizeResponse = self._unary(self._stub.Tokenize, request, timeout)
        return tuple(response.token_ids)

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """The text of token ids; incomplete characters become U+FFFD."""
        request = detokenize_request(
            token_ids, model=model, keep_special_tokens=keep_special_tokens
        )
        response: pb.DetokenizeResponse = self._unary(self._stub.Detokenize, request, timeout)
        return response.text

    def list_models(self, *, timeout: float | None = None) -> tuple[ServedModel, ...]:
        """The models that are served."""
        request = pb.ListModelsRequest()
        response: pb.ListModelsResponse = self._unary(self._stub.ListModels, request, timeout)
        return served_models(response)

    def _attempts(self, timeout: float | None) -> Attempts:
        bound = self._timeout if timeout is None else timeout
        return Attempts(self._retry, bound, self._clock, self._jitter)

    def _unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        attempts = self._attempts(timeout)
        while True:
            try:
                return method(request, timeout=attempts.remaining())
            except grpc.RpcError as failure:
                wait = wait_or_raise(attempts, failure)
            self._sleep(wait)


class Generation(BaseGeneration[_Stream]):
    """One generation, running since it was made; read by one thread. Any thread may cancel it.

    Leaving an iteration over it in any way cancels it on the server at once, and so does leaving
    its `with` block. A generation that is simply dropped is cancelled too.
    """

    def __init__(
        self,
        open_stream: Callable[[float | None], _Stream],
        attempts: Attempts,
        sleep: Callable[[float], None],
    ) -> None:
        super().__init__(open_stream, attempts)
        self._sleep = sleep

    def __iter__(self) -> Iterator[Delta]:
        """The deltas still to come. Raises Cancelled when the generation was cancelled."""
        try:
            while (message := self._read()) is not None:
                delta = self._fold.apply(message)
                if delta is not None:
                    yield delta
            self._fold.end()
        finally:
            self.cancel()

    def result(self) -> GenerationResult:
        """Waits for the end; returns the whole generation, with the deltas already read."""
        for _ in self:
            pass
        return self._fold.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def _read(self) -> pb.GenerateResponse | None:
        while True:
            try:
                return next(self._stream, None)
            except grpc.RpcError as failure:
                wait = self._wait_or_raise(failure)
            self._sleep(wait)
            self._reopen()
