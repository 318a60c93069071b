"""What a generation's client is sent: from the engine's values to messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import assert_never

import grpc

from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.core.request import Origin, Request
from control_plane.core.spans import WeightsSpan
from control_plane.rpc.convert import sampling_to_pb
from control_plane.rpc.errors import GenerationCancelled, RowFailed
from control_plane.shell.engine import AdapterUnavailable, WeightsChanged
from control_plane.shell.stream import Delta, TokenStream
from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2

_MAX_DELTA_CHARACTERS = 2**18
_MAX_DELTA_TOKENS = 2**16
"""Of one message: more gathers only for a reader that is slow for long."""

GenerateContext = grpc.aio.ServicerContext[
    inference_pb2.GenerateRequest, inference_pb2.GenerateResponse
]


class Answer:
    """One generation's way to its client. `prompt_digest` stands for the tokens of its prompt,
    `adapter_digest` is that of its adapter, if it has one."""

    def __init__(
        self,
        started: inference_pb2.GenerationStarted,
        stream: TokenStream,
        prompt_digest: bytes,
        adapter_digest: str = "",
    ) -> None:
        self.started = started
        self.stream = stream
        self._prompt_digest = prompt_digest
        self._adapter_digest = adapter_digest

    async def send(self, context: GenerateContext) -> None:
        """Sends all that the stream has ready, again and again, until the stream ends."""
        await context.write(inference_pb2.GenerateResponse(started=self.started))
        while True:
            delta = await self.stream.take()
            for message in deltas(delta, self._prompt_digest, self._adapter_digest):
                await context.write(message)
            if delta.finish is not None:
                end = finished(delta.finish, delta.stop_string)
                await context.write(inference_pb2.GenerateResponse(finished=end))
                return

    async def whole(self) -> inference_pb2.CompleteResponse:
        """Waits for the stream's end. Raises what ends a generation with an error."""
        started = self.started
        answer = inference_pb2.CompleteResponse(
            request_id=started.request_id, model=started.model, seed=started.seed
        )
        texts: list[str] = []
        while True:
            delta = await self.stream.take()
            texts.append(delta.text)
            answer.token_ids.extend(delta.tokens.ids)
            if delta.finish is not None:
                break
        end = finished(delta.finish, delta.stop_string)
        answer.text = "".join(texts)
        # The fields of these names mean the same in both messages.
        answer.reason = end.reason
        answer.usage.CopyFrom(end.usage)
        answer.arithmetic_changed = end.arithmetic_changed
        answer.weights_spans.extend(end.weights_spans)
        match end.WhichOneof("matched"):
            case "stop_string":
                answer.stop_string = end.stop_string
            case "stop_token_id":
                answer.stop_token_id = end.stop_token_id
            case _:
                pass
        return answer


def deltas(
    delta: Delta, prompt_digest: bytes = b"", adapter_digest: str = ""
) -> Iterator[inference_pb2.GenerateResponse]:
    """What has gathered, in messages that any client takes: gRPC's default is 4 MB.

    No text comes before its tokens: whoever has some of the messages can go on behind them.
    """
    text, token_ids = delta.text, delta.tokens.ids
    told = {index: origin for index, origin in delta.seams if index < len(token_ids)}
    if delta.origin is not None:
        told[0] = delta.origin
    starts = sorted({*told, *range(0, len(token_ids), _MAX_DELTA_TOKENS)})
    text_parts = -(-len(text) // _MAX_DELTA_CHARACTERS)
    first_text = max(len(starts) - 1, 0)
    for part in range(max(len(starts), first_text + text_parts)):
        start = starts[part] if part < len(starts) else len(token_ids)
        end = starts[part + 1] if part + 1 < len(starts) else len(token_ids)
        characters = max(part - first_text, 0) * _MAX_DELTA_CHARACTERS
        text_end = characters + _MAX_DELTA_CHARACTERS if part >= first_text else 0
        message = inference_pb2.GenerationDelta(
            text=text[characters:text_end], token_ids=token_ids[start:end]
        )
        if (origin := told.get(start)) is not None and part < len(starts):
            message.origin.CopyFrom(_origin(origin, prompt_digest, adapter_digest))
        yield inference_pb2.GenerateResponse(delta=message)


def started(request: Request, model_name: str) -> inference_pb2.GenerationStarted:
    """The first message."""
    return inference_pb2.GenerationStarted(
        request_id=request.request_id,
        model=model_name,
        prompt_token_count=len(request.prompt_token_ids),
        seed=request.seed,
        sampling=sampling_to_pb(request.sampling, request.seed),
        max_tokens=request.stop.max_tokens,
    )


def _origin(
    origin: Origin, prompt_digest: bytes, adapter_digest: str
) -> inference_pb2.GenerationOrigin:
    return inference_pb2.GenerationOrigin(
        weights_digest=origin.weights_digest,
        arithmetic=origin.arithmetic,
        arithmetic_changed=origin.arithmetic_changed,
        prompt_digest=prompt_digest,
        weights_name=origin.weights_name,
        kv_of_other_weights=origin.kv_of_other_weights,
        adapter_digest=adapter_digest,
    )


def finished(finish: Finish, stop_string: str | None) -> inference_pb2.GenerationFinished:
    """The last message. Raises the error that a finish is, e.g. RowFailed."""
    match finish.reason:
        case FinishReason.STOP:
            reason = inference_pb2.FINISH_REASON_STOP
        case FinishReason.LENGTH:
            reason = inference_pb2.FINISH_REASON_LENGTH
        case FinishReason.FAULT:
            raise RowFailed(finish.detail or "the worker could not compute the next token")
        case FinishReason.CANCELLED | FinishReason.DEADLINE:
            raise GenerationCancelled
        case FinishReason.ADAPTER_UNAVAILABLE:
            raise AdapterUnavailable(finish.detail)
        case FinishReason.WEIGHTS_CHANGED:
            raise WeightsChanged(finish.detail)
        case _:
            assert_never(finish.reason)
    return inference_pb2.GenerationFinished(
        reason=reason,
        stop_string=stop_string,
        stop_token_id=finish.stop_token_id if stop_string is None else None,
        usage=_usage(finish.usage),
        arithmetic_changed=finish.arithmetic_changed,
        weights_spans=map(_span, finish.spans),
    )


def _span(span: WeightsSpan) -> inference_pb2.WeightsSpan:
    return inference_pb2.WeightsSpan(
        token_count=span.token_count,
        weights_digest=span.weights_digest,
        weights_name=span.weights_name,
        kv_of_other_weights=span.kv_of_other_weights,
    )


def _usage(usage: Usage) -> types_pb2.Usage:
    return types_pb2.Usage(
        prompt_token_count=usage.prompt_tokens,
        cached_prompt_token_count=usage.cached_prompt_tokens,
        completion_token_count=usage.completion_tokens,
    )
