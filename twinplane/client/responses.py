"""Folds response messages into values."""

from __future__ import annotations

from dataclasses import fields

from twinplane.client.values import (
    Delta,
    FinishReason,
    GenerationOrigin,
    GenerationResult,
    ReplicaState,
    SamplingDefaults,
    ServedModel,
    ServingWorker,
    Usage,
    WeightsSpan,
    WeightVersion,
    WorkerState,
)
from twinplane.errors import InternalError, PartialGeneration, TwinplaneError
from twinplane.inference.v1 import inference_pb2 as pb

_FINISH_REASONS = {
    pb.FINISH_REASON_STOP: FinishReason.STOP,
    pb.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}

_WORKER_STATES = {
    pb.WORKER_STATE_ATTACHED: WorkerState.ATTACHED,
    pb.WORKER_STATE_AWAY: WorkerState.AWAY,
    pb.WORKER_STATE_AWAITED: WorkerState.AWAITED,
}
_REPLICA_STATES = {
    pb.REPLICA_STATE_JOINING: ReplicaState.JOINING,
    pb.REPLICA_STATE_ATTACHED: ReplicaState.ATTACHED,
    pb.REPLICA_STATE_SUSPECT: ReplicaState.SUSPECT,
    pb.REPLICA_STATE_LOST: ReplicaState.LOST,
    pb.REPLICA_STATE_DRAINING: ReplicaState.DRAINING,
    pb.REPLICA_STATE_GONE: ReplicaState.GONE,
}


class GenerationFold:
    """What is known of one generation: grows with each message of its stream, and of those that
    resume it.
    """

    def __init__(self) -> None:
        self.started: pb.GenerationStarted | None = None
        self.finished: pb.GenerationFinished | None = None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._origin: pb.GenerationOrigin | None = None
        self._spans: list[pb.WeightsSpan] = []
        """As far as deltas told, for the server that the generation is resumed by."""
        self._starts = True
        """The next message is the first of a stream."""

    @property
    def can_resume(self) -> bool:
        """Whether it has begun, on a server that knows what it is to resume one."""
        return self.started is not None and self.started.HasField("sampling")

    def resuming(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """The message that goes on behind what has come of `request`; its stream is the next."""
        self._starts = True
        started = self.started
        assert started is not None
        again = pb.GenerateRequest()
        again.CopyFrom(request)
        again.request_id = started.request_id
        again.model = started.model
        again.sampling.CopyFrom(started.sampling)
        again.stop.max_tokens = started.max_tokens
        again.resume.token_ids.extend(self._token_ids)
        again.resume.text_byte_count = len("".join(self._texts).encode())
        if self._origin is not None:
            again.resume.origin.CopyFrom(self._origin)
            again.resume.weights_spans.extend(self._spans)
        return again

    def apply(self, message: pb.GenerateResponse) -> Delta | None:
        """Takes in the stream's next message; returns its delta if it carries one.

        Raises InternalError for a message out of order. A message of an unknown kind is ignored.
        """
        event = message.WhichOneof("event")
        starts = self._starts
        if event is not None and (self.finished is not None or (event == "started") != starts):
            raise self.broken(InternalError(f"the server sent {event} out of order"))
        match event:
            case "started":
                self._starts = False
                self.started = self.started or message.started
                if _identity(message.started) != _identity(self.started):
                    raise self.broken(InternalError("the server resumed another generation"))
            case "delta":
                told = message.delta.origin if message.delta.HasField("origin") else None
                origin = None if told is None else _origin(told)
                delta = Delta(message.delta.text, tuple(message.delta.token_ids), origin)
                self._note(told, len(delta.token_ids))
                self._texts.append(delta.text)
                self._token_ids.extend(delta.token_ids)
                return delta
            case "finished":
                self.finished = message.finished
            case _:
                pass
        return None

    def _note(self, told: pb.GenerationOrigin | None, token_count: int) -> None:
        """So many tokens have come, with this news of their origin."""
        if told is not None:
            self._origin = told
            span = pb.WeightsSpan(
                weights_digest=told.weights_digest,
                weights_name=told.weights_name,
                kv_of_other_weights=told.kv_of_other_weights,
            )
            self._spans = [one for one in self._spans if one.token_count] + [span]
        if self._spans:
            self._spans[-1].token_count += token_count

    def end(self) -> None:
        """Called when the stream ended without an error. Raises InternalError if it ended early."""
        if self.finished is None:
            raise self.broken(InternalError("the stream ended before the generation did"))

    def broken(self, error: TwinplaneError) -> TwinplaneError:
        """The error that breaks the generation, with what had come of it."""
        if self.started is not None:
            error.partial = PartialGeneration(
                text="".join(self._texts),
                token_ids=tuple(self._token_ids),
                seed=self.started.seed,
                request_id=self.started.request_id,
                model=self.started.model,
            )
        return error

    def result(self) -> GenerationResult:
        """The whole generation, once it is finished."""
        started, finished = self.started, self.finished
        assert started is not None
        assert finished is not None
        return _result(
            finished,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            seed=started.seed,
            request_id=started.request_id,
            model=started.model,
        )


def _identity(started: pb.GenerationStarted) -> tuple[str, int, int]:
    """What stays the same when a generation is resumed."""
    return started.request_id, started.seed, started.prompt_token_count


def completed(response: pb.CompleteResponse) -> GenerationResult:
    """The generation of a unary call."""
    return _result(
        response,
        text=response.text,
        token_ids=tuple(response.token_ids),
        seed=response.seed,
        request_id=response.request_id,
        model=response.model,
    )


def _result(
    end: pb.GenerationFinished | pb.CompleteResponse,
    *,
    text: str,
    token_ids: tuple[int, ...],
    seed: int,
    request_id: str,
    model: str,
) -> GenerationResult:
    matched = end.WhichOneof("matched")
    return GenerationResult(
        text=text,
        token_ids=token_ids,
        finish_reason=_FINISH_REASONS.get(end.reason, FinishReason.UNKNOWN),
        stop_string=end.stop_string if matched == "stop_string" else None,
        stop_token_id=end.stop_token_id if matched == "stop_token_id" else None,
        usage=Usage(
            end.usage.prompt_token_count,
            end.usage.cached_prompt_token_count,
            end.usage.completion_token_count,
        ),
        seed=seed,
        request_id=request_id,
        model=model,
        arithmetic_changed=end.arithmetic_changed,
        weights_spans=tuple(map(_span, end.weights_spans)),
    )


def _span(span: pb.WeightsSpan) -> WeightsSpan:
    return WeightsSpan(
        span.token_count, span.weights_digest, span.weights_name, span.kv_of_other_weights
    )


def _origin(origin: pb.GenerationOrigin) -> GenerationOrigin:
    return GenerationOrigin(origin.weights_digest, origin.weights_name, origin.kv_of_other_weights)


def served_models(response: pb.ListModelsResponse) -> tuple[ServedModel, ...]:
    """The models in the server's order."""
    return tuple(
        ServedModel(
            name=model.name,
            max_sequence_token_count=model.max_sequence_token_count,
            vocabulary_size=model.vocabulary_size,
            supports_chat=model.supports_chat,
            weight_version=WeightVersion(
                model.weight_version.generation, model.weight_version.digest
            ),
            default_sampling=_sampling_defaults(model),
            weights_name=model.weights_name,
            base_model=model.base_model,
            adapter_digest=model.adapter_digest,
        )
        for model in response.models
    )


def serving_workers(response: pb.ListModelsResponse) -> tuple[ServingWorker, ...]:
    """The workers in the server's order."""
    return tuple(
        ServingWorker(
            state=_WORKER_STATES.get(worker.state, WorkerState.UNKNOWN),
            worker_id=worker.worker_id,
            device=worker.device,
            away_seconds=(
                worker.away.seconds + worker.away.nanos / 1e9 if worker.HasField("away") else None
            ),
            kv_token_count=worker.kv_token_count,
            free_kv_token_count=worker.free_kv_token_count,
            max_sequence_count=worker.max_sequence_count,
            running_sequence_count=worker.running_sequence_count,
            waiting_sequence_count=worker.waiting_sequence_count,
            replica=worker.replica,
            address=worker.address,
            replica_state=_REPLICA_STATES.get(worker.replica_state, ReplicaState.UNKNOWN),
            reason=worker.reason,
        )
        for worker in response.workers
    )


def _sampling_defaults(model: pb.ServedModel) -> SamplingDefaults | None:
    if not model.HasField("default_sampling"):
        return None
    names = (field.name for field in fields(SamplingDefaults))
    return SamplingDefaults(**{name: getattr(model.default_sampling, name) for name in names})
