"""The client edge over a real loopback server, with a fake engine behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import datetime

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

from control_plane.core.errors import QueueFull
from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.core.plan import WeightVersion
from control_plane.core.request import CONTRACT_DEFAULTS, Request, RequestId, SamplingParams
from control_plane.core.tokens import Tokens
from control_plane.rpc.door import MAX_HELD_BYTES, EngineDoor
from control_plane.rpc.errors import status_of
from control_plane.rpc.inference_servicer import InferenceServicer
from control_plane.shell.adapter_registry import AdapterRegistry
from control_plane.shell.engine import ServedModel
from control_plane.shell.stream import TokenStream
from control_plane.shell.workers import ServingWorker
from control_plane.text.model_files import TextModel
from control_plane.text.processor import ChatRenderer, TextLimits, TextProcessor
from control_plane.text.template_pool import TemplatePool
from twinplane.grpc.interceptors import CallEnd, StatusInterceptor
from twinplane.inference.v1 import inference_pb2, inference_pb2_grpc
from twinplane.inference.v1.inference_pb2 import Chat, ChatMessage

MODEL = ServedModel(
    name="tiny",
    max_sequence_token_count=100,
    vocabulary_size=300,
    weight_version=WeightVersion(1, "ab" * 32),
)


@dataclass
class FakeEngine:
    """Records what is submitted and finished; tests push tokens themselves."""

    model: ServedModel | None = MODEL
    refusal: Exception | None = None
    places: int = 1_000
    reserved: int = 0
    """Places of requests that were not submitted yet."""
    requests: list[Request] = field(default_factory=list)
    streams: list[TokenStream] = field(default_factory=list)
    counted: int = 0
    """Tokens that `push` gave the newest request."""
    finished: list[tuple[str, FinishReason]] = field(default_factory=list)
    submitted: asyncio.Event = field(default_factory=asyncio.Event)
    freed: asyncio.Event = field(default_factory=asyncio.Event)

    def served_model(self) -> ServedModel | None:
        return self.model

    def check_room(self) -> None:
        if self.reserved >= self.places:
            raise QueueFull("the queue is full", 2.5)

    def reserve(self) -> Callable[[], None]:
        self.check_room()
        self.reserved += 1

        def give_back() -> None:
            self.reserved -= 1

        return give_back

    def submit(self, request: Request, stream: TokenStream) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.requests.append(request)
        self.streams.append(stream)
        self.counted = 0
        self.submitted.set()

    def finish(self, request_id: RequestId, reason: FinishReason) -> bool:
        self.finished.append((request_id, reason))
        self.freed.set()
        return True

    async def stream(self) -> TokenStream:
        """The newest request's stream, once there is one."""
        async with asyncio.timeout(60):
            await self.submitted.wait()
        return self.streams[-1]

    def push(self, tokens: list[int], finish: Finish | None = None) -> int:
        """Gives the newest request tokens as the core does, to the end of a stop string at most.

        Returns how many it got.
        """
        stream = self.streams[-1]
        count = None if stream.scanner is None or not tokens else stream.scanner.push(tokens)
        self.counted += len(tokens) if count is None else count
        if count is not None:
            finish = self.end(FinishReason.STOP, self.counted)
        stream.push(Tokens(tokens[:count]), finish)
        return len(tokens[:count])

    def end(self, reason: FinishReason, completion_tokens: int = 0, **rest: object) -> Finish:
        """A finish of the newest request."""
        prompt = len(self.requests[-1].prompt_token_ids)
        usage = Usage(prompt, 0, completion_tokens)
        return Finish(reason, usage, **rest)  # type: ignore[arg-type]


@dataclass
class Edge:
    """A running server and a client's stub for it."""

    engine: FakeEngine
    stub: inference_pb2_grpc.InferenceServiceAsyncStub
    port: int
    calls: list[tuple[str, str]]
    counted: asyncio.Event
    text_model: TextModel
    door: EngineDoor
    servicer: InferenceServicer
    workers: list[ServingWorker]
    adapters: AdapterRegistry

    async def wait_counted(self, count: int = 1) -> None:
        """Until that many calls have ended on the server."""
        async with asyncio.timeout(60):
            while len(self.calls) < count:
                self.counted.clear()
                await self.counted.wait()


@asynccontextmanager
async def running_edge(
    text_model: TextModel,
    limits: TextLimits,
    renderer: ChatRenderer | None = None,
    max_held_bytes: int = MAX_HELD_BYTES,
    default_sampling: SamplingParams = CONTRACT_DEFAULTS,
) -> AsyncIterator[Edge]:
    """`renderer` stands in for the processes that render the model's chat template."""
    engine = FakeEngine()
    door = EngineDoor(engine, max_held_bytes)
    calls: list[tuple[str, str]] = []
    counted = asyncio.Event()

    def on_call(end: CallEnd) -> None:
        calls.append((end.method.rsplit("/", 1)[1], end.code))
        counted.set()

    names = iter(range(1, 1_000_000))
    workers: list[ServingWorker] = []
    adapters = AdapterRegistry()
    if renderer is None and text_model.template is not None:
        renderer = TemplatePool(text_model.template, limits.rendering, now=datetime.now)
    text = TextProcessor(text_model, limits, renderer)
    servicer = InferenceServicer(
        engine,
        text,
        clock=lambda: 12.5,
        new_seed=lambda: 7,
        new_request_id=lambda: f"made-{next(names)}",
        workers=lambda: workers,
        default_sampling=default_sampling,
        adapters=adapters,
    )
    server = grpc.aio.server(
        interceptors=[StatusInterceptor(status_of, on_call, lambda: "error-1", door=door)],
        options=[("grpc.max_receive_message_length", 16 << 20)],
    )
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            parts = (engine, stub, port, calls, counted, text_model, door, servicer, workers)
            yield Edge(*parts, adapters)
    finally:
        await server.stop(0)
        text.close()


def generate_request(**fields: object) -> inference_pb2.GenerateRequest:
    """A valid request but for the given fields."""
    if not fields.keys() & {"text", "token_ids", "chat"}:
        fields["text"] = "hi"
    return inference_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Refused:
    """A call's error, its details unpacked."""

    code: grpc.StatusCode
    message: str
    info: error_details_pb2.ErrorInfo
    details: dict[type[Message], Message]

    @property
    def fields(self) -> list[str]:
        """The fields a BadRequest names."""
        bad = self.details.get(error_details_pb2.BadRequest)
        assert bad is None or isinstance(bad, error_details_pb2.BadRequest)
        return [] if bad is None else [violation.field for violation in bad.field_violations]

    @property
    def retry_seconds(self) -> float | None:
        """What a RetryInfo says."""
        retry = self.details.get(error_details_pb2.RetryInfo)
        assert retry is None or isinstance(retry, error_details_pb2.RetryInfo)
        return None if retry is None else retry.retry_delay.ToNanoseconds() / 1e9


def refused(error: grpc.aio.AioRpcError) -> Refused:
    """Reads the status that travels in the trailers; there is always one with an ErrorInfo."""
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    assert status.code == error.code().value[0]
    details: dict[type[Message], Message] = {}
    for packed in status.details:
        for kind in (
            error_details_pb2.ErrorInfo,
            error_details_pb2.BadRequest,
            error_details_pb2.RetryInfo,
            error_details_pb2.QuotaFailure,
        ):
            detail = kind()
            if packed.Unpack(detail):
                details[kind] = detail
    assert len(details) == len(status.details)
    info = details[error_details_pb2.ErrorInfo]
    assert isinstance(info, error_details_pb2.ErrorInfo)
    assert info.domain == "twinplane"
    return Refused(error.code(), error.details() or "", info, details)


async def refusal_of(
    stub: inference_pb2_grpc.InferenceServiceAsyncStub, request: Message
) -> Refused:
    """Sends a request that must be refused."""
    try:
        match request:
            case inference_pb2.GenerateRequest():
                async for _ in stub.Generate(request):
                    pass
            case inference_pb2.CompleteRequest():
                await stub.Complete(request)
            case inference_pb2.TokenizeRequest():
                await stub.Tokenize(request)
            case inference_pb2.DetokenizeRequest():
                await stub.Detokenize(request)
            case inference_pb2.ListModelsRequest():
                await stub.ListModels(request)
    except grpc.aio.AioRpcError as error:
        return refused(error)
    raise AssertionError("the call was not refused")


def ids(text: str, edge: Edge) -> list[int]:
    """The tokens of a text as the edge's model has them."""
    return edge.text_model.tokenizer.encode(text, add_special_tokens=True)


HI = Chat(messages=[ChatMessage(role="user", content="hi")])
