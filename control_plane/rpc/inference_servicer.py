"""twinplane.inference.v1.InferenceService: from a client's message to the engine and back.

Each call is validated, its text turned into tokens, its request submitted, and its tokens turned
into text as they come. Errors are raised unchanged; StatusInterceptor turns them into statuses.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, assert_never

import grpc

from control_plane.core.events import FinishReason
from control_plane.core.request import (
    CONTRACT_DEFAULTS,
    Adapter,
    Request,
    RequestId,
    SamplingParams,
    StopConditions,
)
from control_plane.rpc.adapter_names import Chosen, adapter_to_pb, choose
from control_plane.rpc.answers import Answer, GenerateContext, started
from control_plane.rpc.convert import default_sampling_to_pb, serving_worker_to_pb
from control_plane.rpc.errors import InvalidRequest
from control_plane.rpc.request_log import begin_generation
from control_plane.rpc.resumption import prompt_digest, take_up
from control_plane.rpc.turns import Turns
from control_plane.rpc.validation import (
    MAX_REQUEST_ID_CHARACTERS,
    ChatPrompt,
    GenerateCall,
    GenerationRequest,
    Prompt,
    TextPrompt,
    TokenPrompt,
    check_detokenize,
    check_empty,
    check_generate,
    check_prompt,
    check_stop_strings,
    check_tokenize,
    check_tokens,
)
from control_plane.shell.adapter_registry import AdapterRegistry
from control_plane.shell.engine import Engine, ServedModel
from control_plane.shell.ports import Clock
from control_plane.shell.stream import TokenStream
from control_plane.shell.workers import ServingWorker, away_seconds
from control_plane.text.errors import TextTooLong
from control_plane.text.processor import TextProcessor
from twinplane.common.v1 import types_pb2
from twinplane.errors import Violation
from twinplane.grpc.interceptors import REQUEST_ID, deadline_passed, leave_door, require_time
from twinplane.inference.v1 import inference_pb2, inference_pb2_grpc


async def _at_once() -> None:
    """There is nothing to wait for."""


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """The clients' RPCs. It needs StatusInterceptor in front of it.

    `new_seed` returns an unsigned 64-bit seed for a request without one; `new_request_id` returns
    an id for a request without one. `workers` returns the engine's, as they are now. `settled`
    returns once the first claim of a worker has come to something, or has taken too long to wait
    for. `default_sampling` holds for what a request leaves unset. `adapters` are those that
    requests may name.
    """

    def __init__(
        self,
        engine: Engine,
        text: TextProcessor,
        *,
        clock: Clock,
        new_seed: Callable[[], int],
        new_request_id: Callable[[], str],
        workers: Callable[[], Sequence[ServingWorker]] = tuple,
        settled: Callable[[], Awaitable[None]] = _at_once,
        default_sampling: SamplingParams = CONTRACT_DEFAULTS,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        self._engine = engine
        self._text = text
        self._clock = clock
        self._new_seed = new_seed
        self._new_request_id = new_request_id
        self._workers = workers
        self._settled = settled
        self._default_sampling = default_sampling
        self._adapters = adapters or AdapterRegistry()
        self._turns = Turns()
        self._generating: set[asyncio.Task[None]] = set()

    async def finished(self) -> None:
        """Returns once every generation's call is over: its client has read all, or has left."""
        while self._generating:
            await asyncio.wait(self._generating)

    async def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: GenerateContext
    ) -> None:
        # A coroutine, not a generator, so that its `finally` runs in this task as soon as the call
        # is cancelled.
        self._note_generating()
        submitting = self._submit(request, context)
        # For as long as the call lasts, nobody holds its message or its prompt: they may be large.
        del request
        answer = await submitting
        try:
            await answer.send(context)
        finally:
            self._leave(answer, context)

    async def Complete(  # noqa: N802
        self,
        request: inference_pb2.CompleteRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.CompleteRequest, inference_pb2.CompleteResponse
        ],
    ) -> inference_pb2.CompleteResponse:
        self._note_generating()
        submitting = self._submit(request, context)
        del request  # as in Generate
        answer = await submitting
        try:
            return await answer.whole()
        finally:
            self._leave(answer, context)

    def _note_generating(self) -> None:
        """The current task is a call that `finished` waits for."""
        call = asyncio.current_task()
        assert call is not None
        self._generating.add(call)
        call.add_done_callback(self._generating.discard)

    def _leave(self, answer: Answer, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """The call of this generation is over, whether the generation is or not."""
        if answer.stream.ended:
            return
        reason = FinishReason.DEADLINE if deadline_passed(context) else FinishReason.CANCELLED
        self._engine.finish(RequestId(answer.started.request_id), reason)

    async def _submit(
        self, request: GenerationRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> Answer:
        """Hands the request to the engine. Returns its way to the client."""
        arrival = self._clock()
        request_id = RequestId(request.request_id or self._new_request_id())
        REQUEST_ID.set(request_id[:MAX_REQUEST_ID_CHARACTERS])  # it was not checked yet
        told = begin_generation()
        chosen = await self._chosen(request.model, request.adapter)
        model = chosen.model
        told.model = chosen.name
        call = check_generate(request, model, self._default_sampling)
        del request
        token_ids = await self._encode(call.prompt)
        told.prompt_token_count = len(token_ids)
        max_tokens = check_prompt(call.prompt, token_ids, call.stop, model)
        ends = self._text.ends(
            chat=isinstance(call.prompt, ChatPrompt), ignored=call.stop.ignore_end_of_sequence
        )
        check_stop_strings(call.stop, lambda string: self._text.can_write(string, ends))
        core_request = self._core_request(
            call, request_id, token_ids, max_tokens, ends.ids, arrival, chosen.adapter
        )
        digest = prompt_digest(core_request.prompt_token_ids)
        assembler = self._text.assembler(call.stop.strings, token_ids, ends)
        resume, end = call.resume, None
        if resume is not None:
            told.resumed_token_count = len(resume.token_ids)
            resume.check_prompt(digest)
            resume.check_adapter(chosen.adapter_digest)
            end = await take_up(resume, core_request, model, self._text, assembler)
        stream = TokenStream(assembler, self._turns, resume.origin if resume else None)
        require_time(context)
        leave_door()
        if end is None:
            self._engine.submit(core_request, stream)
        else:
            stream.end_at_once(core_request, end, self._clock())
        told.stream = stream
        begun = started(core_request, chosen.name)
        return Answer(begun, stream, digest, chosen.adapter_digest)

    async def Tokenize(  # noqa: N802
        self,
        request: inference_pb2.TokenizeRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.TokenizeRequest, inference_pb2.TokenizeResponse
        ],
    ) -> inference_pb2.TokenizeResponse:
        model = (await self._chosen(request.model)).model
        call = check_tokenize(request, model)
        token_ids = await self._encode(call.prompt, add_special_tokens=call.add_special_tokens)
        check_tokens(call.prompt, token_ids, model)
        return inference_pb2.TokenizeResponse(
            token_ids=token_ids, max_sequence_token_count=model.max_sequence_token_count
        )

    async def Detokenize(  # noqa: N802
        self,
        request: inference_pb2.DetokenizeRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.DetokenizeRequest, inference_pb2.DetokenizeResponse
        ],
    ) -> inference_pb2.DetokenizeResponse:
        model = (await self._chosen(request.model)).model
        token_ids = check_detokenize(request, model)
        text = await self._text.decode(
            token_ids, skip_special_tokens=not request.keep_special_tokens
        )
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self,
        request: inference_pb2.ListModelsRequest,
        context: grpc.aio.ServicerContext[
            inference_pb2.ListModelsRequest, inference_pb2.ListModelsResponse
        ],
    ) -> inference_pb2.ListModelsResponse:
        check_empty(request)
        model = self._engine.served_model()
        models = []
        if model is not None:
            base = await self._served_model(model)
            models = [base, *(adapter_to_pb(base, one) for one in self._adapters.adapters())]
        workers = map(serving_worker_to_pb, self._workers())
        return inference_pb2.ListModelsResponse(models=models, workers=workers)

    async def _encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> Sequence[int]:
        try:
            match prompt:
                case TextPrompt(text=text):
                    return await self._text.encode(text, add_special_tokens=add_special_tokens)
                case TokenPrompt(token_ids=token_ids):
                    return token_ids
                case ChatPrompt(messages=messages):
                    return await self._text.encode_chat(messages)
                case _:
                    assert_never(prompt)
        except TextTooLong as error:
            raise InvalidRequest([Violation(prompt.field, str(error))]) from error

    async def _chosen(self, name: str, adapter: str = "") -> Chosen:
        if self._engine.served_model() is None:
            await self._settled()
        served = self._engine.served_model()
        away = 0.0 if served else away_seconds(self._workers())
        return choose(name, adapter, served, self._adapters, away)

    def _core_request(
        self,
        call: GenerateCall,
        request_id: RequestId,
        token_ids: Sequence[int],
        max_tokens: int,
        end_of_sequence_ids: frozenset[int],
        arrival: float,
        adapter: Adapter | None,
    ) -> Request:
        return Request(
            request_id=request_id,
            prompt_token_ids=array("I", token_ids),
            sampling=call.sampling,
            seed=self._new_seed() if call.seed is None else call.seed,
            stop=StopConditions(max_tokens, call.stop.token_ids, end_of_sequence_ids),
            arrival=arrival,
            priority=call.priority,
            cache_salt=call.cache_salt,
            resumed=None if call.resume is None else call.resume.resumed,
            adapter=adapter,
        )

    async def _served_model(self, model: ServedModel) -> inference_pb2.ServedModel:
        version = model.weight_version
        return inference_pb2.ServedModel(
            name=model.name,
            max_sequence_token_count=model.max_sequence_token_count,
            vocabulary_size=model.vocabulary_size,
            supports_chat=await self._text.supports_chat(),
            weight_version=types_pb2.WeightVersion(
                generation=version.generation, digest=version.digest
            ),
            default_sampling=default_sampling_to_pb(self._default_sampling),
            weights_name=version.name,
        )
