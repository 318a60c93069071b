"""The asyncio client: the blocking one's twin, method by method."""

from __future__ import annotations

import asyncio
import random
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc
import grpc.aio

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
from twinplane.errors import Cancelled
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc
from twinplane.paths import expand_address

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class _Stream(Protocol):
    async def read(self) -> pb.GenerateResponse | object: ...
    def cancel(self) -> object: ...


class AsyncClient:
    """Talks to a control plane from one event loop, in which it connects on first use.

        async with AsyncClient() as client:
            async for delta in client.generate("Once upon a time", max_tokens=32):
                print(delta.text, end="", flush=True)

    Arguments are those of Client. Every method raises subclasses of TwinplaneError. A task that is
    cancelled cancels its call and gets its CancelledError.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: TlsCredentials | None = None,
        timeout: float | None = None,
        retry: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        self._timeout = timeout
        self._retry = retry or RetryPolicy()
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter or random.Random().random
        self._address = expand_address(address)
        self._credentials = credentials
        self._channel: grpc.aio.Channel | None = None
        self._generations: weakref.WeakSet[AsyncGeneration] = weakref.WeakSet()

    async def close(self) -> None:
        """Closes the connection; generations that run are cancelled."""
        for generation in list(self._generations):  # gRPC finds only some of its calls
            generation.cancel()
        if self._channel is not None:
            await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @with_options_documented
    def generate(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Starts a generation, as Client.generate does. Call it within the event loop."""
        request = generate_request(prompt, options)

        def open_stream(remaining: float | None) -> _Stream:
            stream: _Stream = self._stub().Generate(request, timeout=remaining)
            return stream

        generation = AsyncGeneration(open_stream, self._attempts(timeout), self._sleep)
        self._generations.add(generation)
        return generation

    async def tokenize(
        self,
        text: str | Sequence[Message],
        *,
        model: str = "",
        add_special_tokens: bool = True,
        timeout: float | None = None,
    ) -> tuple[int, ...]:
        """As Client.tokenize."""
        request = tokenize_request(text, model=model, add_special_tokens=add_special_tokens)
        response: pb.TokenizeResponse = await self._unary(self._stub().Tokenize, request, timeout)
        return tuple(response.token_ids)

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        keep_special_tokens: bool = False,
        timeout: float | None = None,
    ) -> str:
        """As Client.detokenize."""
        request = detokenize_request(
            token_ids, model=model, keep_special_tokens=keep_special_tokens
        )
        response: pb.DetokenizeResponse = await self._unary(
            self._stub().Detokenize, request, timeout
        )
        return response.text

    async def list_models(self, *, timeout: float | None = None) -> tuple[ServedModel, ...]:
        """As Client.list_models."""
        request = pb.ListModelsRequest()
        response: pb.ListModelsResponse = await self._unary(
            self._stub().ListModels, request, timeout
        )
        return served_models(response)

    def _stub(self) -> inference_pb2_grpc.InferenceServiceStub:
        if self._channel is None:
            self._channel = (
                grpc.aio.insecure_channel(self._address, OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(
                    self._address, channel_credentials(self._credentials), OPTIONS
                )
            )
        return inference_pb2_grpc.InferenceServiceStub(self._channel)

    def _attempts(self, timeout: float | None) -> Attempts:
        bound = self._timeout if timeout is None else timeout
        return Attempts(self._retry, bound, self._clock, self._jitter)

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,
    ) -> _Response:
        attempts = self._attempts(timeout)
        while True:
            try:
                return await method(request, timeout=attempts.remaining())
            except grpc.RpcError as failure:
                wait = wait_or_raise(attempts, failure)
            except asyncio.CancelledError:
                _raise_if_call_was_cancelled()
                raise
            await self._sleep(wait)


class AsyncGeneration(BaseGeneration[_Stream]):
    """One generation, running since it was made; read by one task.

    Leaving an iteration over it in any way cancels it on the server at once, and so does leaving
    its `async with` block. A generation that is simply dropped is cancelled too.
    """

    def __init__(
        self,
        open_stream: Callable[[float | None], _Stream],
        attempts: Attempts,
        sleep: Callable[[float], Awaitable[None]],
    ) -> None:
        super().__init__(open_stream, attempts)
        self._sleep = sleep

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas still to come. Raises Cancelled when the generation was cancelled."""
        try:
            while (message := await self._read()) is not None:
                delta = self._fold.apply(message)
                if delta is not None:
                    yield delta
            self._fold.end()
        finally:
            self.cancel()

    async def result(self) -> GenerationResult:
        """Waits for the end; returns the whole generation, with the deltas already read."""
        async for _ in self:
            pass
        return self._fold.result()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    async def _read(self) -> pb.GenerateResponse | None:
        while True:
            try:
                message = await self._stream.read()
                return message if isinstance(message, pb.GenerateResponse) else None
            except grpc.RpcError as failure:
                wait = self._wait_or_raise(failure)
            except asyncio.CancelledError:
                _raise_if_call_was_cancelled()
                raise
            await self._sleep(wait)
            self._reopen()


def _raise_if_call_was_cancelled() -> None:
    """Raises Cancelled for a CancelledError that gRPC raised because the call was cancelled.

    A CancelledError of the task itself goes on as it is.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling() == 0:
        raise Cancelled("the call was cancelled by its client") from None
