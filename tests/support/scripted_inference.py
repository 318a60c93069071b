"""An InferenceService on a loopback port that plays what a test wrote down, and notes what it saw.

Needs no control plane: it stands in for any server, well behaved or not.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import grpc
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc

PATIENCE = 20.0
"""Seconds after which a test that waits for the other side has failed."""


@dataclass(frozen=True)
class Fail:
    """The call ends with this status and these google.rpc details."""

    code: grpc.StatusCode
    message: str = "scripted"
    details: tuple[Message, ...] = ()


@dataclass(frozen=True)
class Hang:
    """The call stays open until its client leaves."""


Script = list["pb.GenerateResponse | Fail | Hang"]


def started(request_id: str = "r-1", seed: int = 7, prompt_tokens: int = 3) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        started=pb.GenerationStarted(
            request_id=request_id, model="m", prompt_token_count=prompt_tokens, seed=seed
        )
    )


def delta(text: str, *token_ids: int) -> pb.GenerateResponse:
    return pb.GenerateResponse(delta=pb.GenerationDelta(text=text, token_ids=token_ids))


def finished(**fields: object) -> pb.GenerateResponse:
    fields.setdefault("reason", pb.FINISH_REASON_LENGTH)
    return pb.GenerateResponse(finished=pb.GenerationFinished(**fields))


def retry_info(seconds: float) -> Message:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.FromTimedelta(timedelta(seconds=seconds))
    return info


@dataclass
class ScriptedInference(inference_pb2_grpc.InferenceServiceServicer):
    """`scripts` are played one per Generate call, `failures` one per unary call before it works."""

    scripts: deque[Script] = field(default_factory=deque)
    failures: deque[Fail] = field(default_factory=deque)
    requests: list[Message] = field(default_factory=list)
    time_left: list[float | None] = field(default_factory=list)
    left: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once for each generation whose client left before its script was over."""
    metadata: list[dict[str, str | bytes]] = field(default_factory=list)
    """Of each call."""
    health: deque[int | Fail] = field(default_factory=deque)
    """Answers to health checks of the service; the last one stays. Empty: it has no health."""
    supports_chat: bool = True
    workers: list[pb.ServingWorker] = field(default_factory=list)
    unready: int = 0
    """How often ListModels is answered before there is a model."""
    default_sampling: types_pb2.SamplingParameters | None = field(
        default_factory=lambda: types_pb2.SamplingParameters(
            temperature=0.5, top_k=20, top_p=0.75, min_p=0.0
        )
    )
    hanging: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    """Released once for each call that begins to hang."""

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self._note(request, context)
        script = self.scripts.popleft()
        gone, over = threading.Event(), threading.Event()

        def on_end() -> None:
            if not over.is_set():
                self.left.release()
            gone.set()

        context.add_callback(on_end)
        for step in script:
            match step:
                case Fail():
                    over.set()
                    _abort(step, context)
                case Hang():
                    self.hanging.release()
                    gone.wait(PATIENCE)
                case _:
                    yield step
        over.set()

    def Complete(  # noqa: N802
        self, request: pb.CompleteRequest, context: grpc.ServicerContext
    ) -> pb.CompleteResponse:
        """The next script in one answer; a script that hangs is for Generate."""
        self._note(request, context)
        answer = pb.CompleteResponse()
        for step in self.scripts.popleft():
            match step:
                case Fail():
                    _abort(step, context)
                case pb.GenerateResponse():
                    _add(answer, step)
                case _:
                    raise AssertionError(step)
        return answer

    def Tokenize(  # noqa: N802
        self, request: pb.TokenizeRequest, context: grpc.ServicerContext
    ) -> pb.TokenizeResponse:
        self._note(request, context)
        return pb.TokenizeResponse(token_ids=[1, 2, 3], max_sequence_token_count=64)

    def Detokenize(  # noqa: N802
        self, request: pb.DetokenizeRequest, context: grpc.ServicerContext
    ) -> pb.DetokenizeResponse:
        self._note(request, context)
        return pb.DetokenizeResponse(text="one two")

    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        self._note(request, context)
        if self.unready > 0:
            self.unready -= 1
            return pb.ListModelsResponse(workers=self.workers)
        model = pb.ServedModel(
            name="m",
            max_sequence_token_count=64,
            vocabulary_size=9,
            supports_chat=self.supports_chat,
            default_sampling=self.default_sampling,
        )
        model.weight_version.generation = 1
        model.weight_version.digest = "ab"
        return pb.ListModelsResponse(models=[model], workers=self.workers)

    def _note(self, request: Message, context: grpc.ServicerContext) -> None:
        self.requests.append(request)
        self.time_left.append(context.time_remaining())
        self.metadata.append(dict(context.invocation_metadata()))
        if self.failures:
            _abort(self.failures.popleft(), context)


def _add(answer: pb.CompleteResponse, message: pb.GenerateResponse) -> None:
    started, finished = message.started, message.finished
    answer.text += message.delta.text
    answer.token_ids.extend(message.delta.token_ids)
    answer.seed = started.seed or answer.seed
    answer.request_id = started.request_id or answer.request_id
    answer.model = started.model or answer.model
    for end, value in finished.ListFields():
        if end.message_type is None:
            setattr(answer, end.name, value)
        else:
            getattr(answer, end.name).CopyFrom(value)
    if finished.HasField("stop_token_id"):
        answer.stop_token_id = finished.stop_token_id


class _Health(health_pb2_grpc.HealthServicer):
    def __init__(self, service: ScriptedInference) -> None:
        self._service = service

    def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        assert request.service == "twinplane.inference.v1.InferenceService"
        self._service.metadata.append(dict(context.invocation_metadata()))
        answers = self._service.health
        answer = answers.popleft() if len(answers) > 1 else answers[0]
        if isinstance(answer, Fail):
            _abort(answer, context)
        return health_pb2.HealthCheckResponse(status=answer)


def _abort(failure: Fail, context: grpc.ServicerContext) -> None:
    status = status_pb2.Status(code=failure.code.value[0], message=failure.message)
    for detail in failure.details:
        status.details.add().Pack(detail)
    context.abort_with_status(rpc_status.to_status(status))


@contextmanager
def serve(
    service: ScriptedInference,
    credentials: grpc.ServerCredentials | None = None,
    port: int = 0,
) -> Iterator[str]:
    """Serves on a loopback port, by default a free one; yields its address."""
    server = grpc.server(ThreadPoolExecutor(max_workers=8), options=[("grpc.so_reuseport", 0)])
    inference_pb2_grpc.add_InferenceServiceServicer_to_server(service, server)
    if service.health:
        health_pb2_grpc.add_HealthServicer_to_server(_Health(service), server)
    port = (
        server.add_insecure_port(f"127.0.0.1:{port}")
        if credentials is None
        else server.add_secure_port(f"127.0.0.1:{port}", credentials)
    )
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()
