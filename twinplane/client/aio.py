"""The asyncio client: the blocking one's twin, method by method."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc
import grpc.aio

from twinplane.client import arguments, health
from twinplane.client.base import BaseClient
from twinplane.client.channel import OPTIONS, channel_credentials
from twinplane.client.failures import Failures
from twinplane.client.generation import BaseGeneration
from twinplane.client.home import Home
from twinplane.client.options import GenerateOptions, with_options_documented
from twinplane.client.requests import (
    complete_request,
    detokenize_request,
    generate_request,
    tokenize_request,
)
from twinplane.client.responses import completed, served_models, serving_workers
from twinplane.client.retry import Attempts, RetryPolicy
from twinplane.client.values import (
    DEFAULT_ADDRESS,
    Conversation,
    Delta,
    GenerationResult,
    Health,
    Prompt,
    ServedModel,
    ServingWorker,
    TlsCredentials,
)
from twinplane.errors import (
    Cancelled,
    DeadlineExceeded,
    TwinplaneError,
    Unavailable,
)
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")


class _Stream(Protocol):
    async def read(self) -> pb.GenerateResponse | object: ...
    def cancel(self) -> object: ...


class AsyncClient(BaseClient):
    """Talks to a control plane from one event loop, in which it connects on first use.

        async with AsyncClient() as client:
            async for delta in client.generate("Once upon a time", max_tokens=32):
                print(delta.text, end="", flush=True)

    Arguments and errors are those of Client. A task that is cancelled cancels its call and gets its
    CancelledError. Another event loop needs a client of its own, and so does another process; one
    that forks after this was used may hang in gRPC, whatever it does: spawn it.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        credentials: TlsCredentials | None = None,
        metadata: Mapping[str, str | bytes] | None = None,
        timeout: float | None = None,
        retry: RetryPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(address, credentials, metadata, timeout, retry, clock, jitter)
        self._sleep = sleep
        self._home: Home | None = None
        self._channel: grpc.aio.Channel | None = None
        self._generations: weakref.WeakSet[AsyncGeneration] = weakref.WeakSet()

    async def close(self) -> None:
        """Closes the connection; generations that run are cancelled."""
        self._failures.client_closed = True
        channel, self._channel = self._channel, None
        if channel is None or (self._home is not None and not self._home.is_here()):
            return  # the event loop that could close it is another, or gone with all its calls
        for generation in list(self._generations):  # gRPC finds only some of its calls
            generation.cancel()
        await channel.close()

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
        resume: bool = True,
        **options: Unpack[GenerateOptions],
    ) -> AsyncGeneration:
        """Starts a generation, as Client.generate does. Call it within the event loop."""
        request = generate_request(prompt, options)

        def open_stream(request: pb.GenerateRequest, remaining: float | None) -> _Stream:
            stream: _Stream = self._stub().Generate(
                request, timeout=remaining, metadata=self._metadata()
            )
            return stream

        generation = AsyncGeneration(
            request,
            open_stream,
            self._attempts(timeout),
            self._failures,
            self._sleep,
            resumes=arguments.truth("resume", resume),
        )
        self._generations.add(generation)
        return generation

    @with_options_documented
    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        resume: bool = True,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult:
        """As Client.complete."""
        request = complete_request(prompt, options)
        resumes = arguments.truth("resume", resume)
        return completed(
            await self._unary(self._stub().Complete, request, timeout, resumes=resumes)
        )

    async def tokenize(
        self,
        text: str | Conversation,
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

    async def list_workers(self, *, timeout: float | None = None) -> tuple[ServingWorker, ...]:
        """As Client.list_workers."""
        request = pb.ListModelsRequest()
        response: pb.ListModelsResponse = await self._unary(
            self._stub().ListModels, request, timeout
        )
        return serving_workers(response)

    async def health(self, *, timeout: float | None = None) -> Health:
        """As Client.health."""
        attempts = self._attempts(timeout)
        check = self._open_channel().unary_unary(
            health.CHECK,
            request_serializer=health.serialize,
            response_deserializer=health.parse,
        )
        try:
            answer = await check(
                health.question(), timeout=attempts.remaining(), metadata=self._metadata()
            )
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.NOT_FOUND:
                raise self._failures.not_a_control_plane() from failure
            raise self._failures.error_of(failure, attempts.timeout) from failure
        except asyncio.CancelledError:
            _raise_if_call_was_cancelled()
            raise
        return health.health_of(answer)

    async def wait_ready(self, timeout: float | None = None) -> None:
        """As Client.wait_ready."""
        wait = health.ReadyWait(self._endpoint, self._attempts(timeout))
        while True:
            seen: TwinplaneError | None = None
            try:
                if await self.health(timeout=wait.look_seconds()) is Health.SERVING:
                    return
            except (Unavailable, DeadlineExceeded) as error:
                seen = error
            await self._sleep(wait.pause_after(seen))

    def _stub(self) -> inference_pb2_grpc.InferenceServiceStub:
        return inference_pb2_grpc.InferenceServiceStub(self._open_channel())

    def _open_channel(self) -> grpc.aio.Channel:
        """The channel, made at the first call. Raises ClientUnusable where it can't be used."""
        self._require_open()
        if self._home is None:
            self._home = Home.here()
        self._home.require()
        if self._channel is None:
            target = self._endpoint.address
            self._channel = (
                grpc.aio.insecure_channel(target, OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(
                    target, channel_credentials(self._credentials), OPTIONS
                )
            )
        return self._channel

    async def _unary(
        self,
        method: grpc.aio.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,
        *,
        resumes: bool = False,
    ) -> _Response:
        attempts = self._attempts(timeout)
        while True:
            try:
                self._open_channel()  # or it was closed during a wait
                return await method(
                    request, timeout=attempts.remaining(), metadata=self._metadata()
                )
            except grpc.RpcError as failure:
                wait = self._failures.wait_or_raise(attempts, failure, resumes=resumes)
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
        request: pb.GenerateRequest,
        open_stream: Callable[[pb.GenerateRequest, float | None], _Stream],
        attempts: Attempts,
        failures: Failures,
        sleep: Callable[[float], Awaitable[None]],
        *,
        resumes: bool,
    ) -> None:
        super().__init__(request, open_stream, attempts, failures, resumes=resumes)
        self._sleep = sleep
        self._home = Home.here()

    def __del__(self) -> None:
        # gRPC's call cancels itself when nobody keeps it, but newer releases keep it themselves.
        home = getattr(self, "_home", None)  # there once the call has been started
        if home is not None and home.is_here():
            self._stream.cancel()

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """The deltas still to come. Raises Cancelled when the generation was cancelled."""
        try:
            while (message := await self._read()) is not None:
                delta = self._apply(message)
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
        self._home.require()
        while True:
            try:
                message = await self._stream.read()
                return message if isinstance(message, pb.GenerateResponse) else None
            except grpc.RpcError as failure:
                wait = self._wait_or_raise(failure)
            except asyncio.CancelledError:
                try:
                    _raise_if_call_was_cancelled()
                except Cancelled as error:
                    raise self._fold.broken(error) from None
                raise
            if wait is None:
                return None
            await self._sleep(wait)
            self._reopen()


def _raise_if_call_was_cancelled() -> None:
    """Raises Cancelled for a CancelledError that gRPC raised because the call was cancelled.

    A CancelledError of the task itself goes on as it is.
    """
    task = asyncio.current_task()
    if task is None or task.cancelling() == 0:
        raise Cancelled("the call was cancelled by its client") from None
