"""The blocking client."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Protocol, Self, TypeVar, Unpack

import grpc

from twinplane.client import arguments, health
from twinplane.client.base import BaseClient
from twinplane.client.channel import OPTIONS, channel_credentials
from twinplane.client.failures import Failures
from twinplane.client.generation import BaseGeneration
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
from twinplane.errors import DeadlineExceeded, TwinplaneError, Unavailable
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc

_Request = TypeVar("_Request")
_Response = TypeVar("_Response")
_Call = TypeVar("_Call")


class _Stream(Protocol):
    def __next__(self) -> pb.GenerateResponse: ...
    def cancel(self) -> object: ...


class Client(BaseClient):
    """Talks to a control plane; any number of threads may share one.

        with Client() as client:
            for delta in client.generate("Once upon a time", max_tokens=32):
                print(delta.text, end="", flush=True)

    `address` is host:port, unix:/path, or any gRPC target; `unix:~/path` is below the home folder
    (NoHomeFolder, a ValueError, where there is none). Without `credentials` the connection is
    plain, which is meant for loopback. `metadata` goes with every call, e.g. {"authorization":
    "Bearer …"}; the mapping is read at each call, so a token in it can be renewed. `timeout` in
    seconds holds for every call that names none.

    Every method raises subclasses of TwinplaneError for what happens, and TypeError, naming the
    argument, for a value of a wrong type. `clock`, `sleep` and `jitter` are for tests.

    A process that was forked while it used gRPC should make a client of its own; one that has used
    AsyncClient must not fork at all, since gRPC may hang in the child: spawn it.
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
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] | None = None,
    ) -> None:
        super().__init__(address, credentials, metadata, timeout, retry, clock, jitter)
        self._sleep = sleep
        target = self._endpoint.address
        self._channel = (
            grpc.insecure_channel(target, OPTIONS)
            if credentials is None
            else grpc.secure_channel(target, channel_credentials(credentials), OPTIONS)
        )
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._check = self._channel.unary_unary(
            health.CHECK,
            request_serializer=health.serialize,
            response_deserializer=health.parse,
        )

    def close(self) -> None:
        """Closes the connection; generations that run are cancelled."""
        self._failures.client_closed = True
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
        resume: bool = True,
        **options: Unpack[GenerateOptions],
    ) -> Generation:
        """Starts a generation; iterate over it for its deltas, or ask it for its `result()`.

        `prompt` is plain text, token ids taken as they are, or a conversation of Message, or of
        mappings with a role and a content. `timeout` in seconds bounds the whole generation.
        With `resume`, a generation whose server is lost goes on where another one, or the same one
        restarted, takes it up: the iteration pauses and then goes on as if nothing had happened.

        Raises InvalidRequest and TypeError here for what no message can carry; what the server
        refuses is raised when the generation is read. `partial` of an error has what came before.
        """
        request = generate_request(prompt, options)

        def open_stream(request: pb.GenerateRequest, remaining: float | None) -> _Stream:
            stream: _Stream = self._started(self._stub.Generate, request, remaining)
            return stream

        return Generation(
            request,
            open_stream,
            self._attempts(timeout),
            self._failures,
            self._sleep,
            resumes=arguments.truth("resume", resume),
        )

    @with_options_documented
    def complete(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,
        resume: bool = True,
        **options: Unpack[GenerateOptions],
    ) -> GenerationResult:
        """Waits for a whole generation, by one call and its one answer.

        Takes what `generate` takes. A call that fails has no text: for a long generation, or to see
        the text as it comes, use `generate`. With `resume`, a call whose server is lost is made
        again, from the beginning, until another one answers it.
        """
        request = complete_request(prompt, options)
        resumes = arguments.truth("resume", resume)
        return completed(self._unary(self._stub.Complete, request, timeout, resumes=resumes))

    def tokenize(
        self,
        text: str | Conversation,
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

    def list_workers(self, *, timeout: float | None = None) -> tuple[ServingWorker, ...]:
        """The workers that execute the models, those that are away included.

        Empty when the server is too old to tell.
        """
        request = pb.ListModelsRequest()
        response: pb.ListModelsResponse = self._unary(self._stub.ListModels, request, timeout)
        return serving_workers(response)

    def health(self, *, timeout: float | None = None) -> Health:
        """Whether the server takes work now. It is asked once.

        Raises Unavailable when no server answers, and WrongServer for one that is no control plane.
        """
        try:
            attempts = self._attempts(timeout)
            return health.health_of(
                self._started(self._check, health.question(), attempts.remaining())
            )
        except grpc.RpcError as failure:
            if failure.code() is grpc.StatusCode.NOT_FOUND:
                raise self._failures.not_a_control_plane() from failure
            raise self._failures.error_of(failure, attempts.timeout) from failure

    def wait_ready(self, timeout: float | None = None) -> None:
        """Returns once the server takes work, for which it need not run yet.

        Raises DeadlineExceeded, with the last cause, when that takes longer than `timeout` seconds;
        WrongServer at once. Without a timeout, here or of the client, it may wait for ever.
        """
        wait = health.ReadyWait(self._endpoint, self._attempts(timeout))
        while True:
            seen: TwinplaneError | None = None
            try:
                if self.health(timeout=wait.look_seconds()) is Health.SERVING:
                    return
            except (Unavailable, DeadlineExceeded) as error:
                seen = error
            self._sleep(wait.pause_after(seen))

    def _started(
        self, method: Callable[..., _Call], request: object, remaining: float | None
    ) -> _Call:
        """Starts a call. Raises ClientUnusable once the client is closed."""
        self._require_open()
        try:
            return method(request, timeout=remaining, metadata=self._metadata())
        except ValueError:  # another thread closed the channel just now
            self._require_open()
            raise

    def _unary(
        self,
        method: grpc.UnaryUnaryMultiCallable[_Request, _Response],
        request: _Request,
        timeout: float | None,
        *,
        resumes: bool = False,
    ) -> _Response:
        attempts = self._attempts(timeout)
        while True:
            try:
                return self._started(method, request, attempts.remaining())
            except grpc.RpcError as failure:
                wait = self._failures.wait_or_raise(attempts, failure, resumes=resumes)
            self._sleep(wait)


class Generation(BaseGeneration[_Stream]):
    """One generation, running since it was made; read by one thread. Any thread may cancel it.

    Leaving an iteration over it in any way cancels it on the server at once, and so does leaving
    its `with` block. A generation that is simply dropped is cancelled too.
    """

    def __init__(
        self,
        request: pb.GenerateRequest,
        open_stream: Callable[[pb.GenerateRequest, float | None], _Stream],
        attempts: Attempts,
        failures: Failures,
        sleep: Callable[[float], None],
        *,
        resumes: bool,
    ) -> None:
        super().__init__(request, open_stream, attempts, failures, resumes=resumes)
        self._sleep = sleep

    def __iter__(self) -> Iterator[Delta]:
        """The deltas still to come. Raises Cancelled when the generation was cancelled."""
        try:
            while (message := self._read()) is not None:
                delta = self._apply(message)
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
            if wait is None:
                return None
            self._sleep(wait)
            self._reopen()
