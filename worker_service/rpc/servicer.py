"""ModelRunnerService over the facade. Forward and Sample do what Execute does, once per call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, assert_never

import grpc

from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc
from worker_service.domain.errors import PlanInvalid, WorkerDraining
from worker_service.domain.plan import StepResult
from worker_service.facade import Pipeline, WorkerFacade
from worker_service.lifecycle import LifecycleState
from worker_service.rpc import convert

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The result of one pipeline message, and the kind of answer that carries it."""

    kind: str
    result: asyncio.Future[StepResult]


class ModelRunnerServicer(model_runner_pb2_grpc.ModelRunnerServiceServicer):
    """The worker's RPCs. Refusals are raised unchanged: it needs StatusInterceptor in front."""

    def __init__(self, facade: WorkerFacade) -> None:
        self._facade = facade
        self._readers: set[asyncio.Task[None]] = set()

    def end_streams(self) -> None:
        """Stops reading every Execute stream. A stream ends once its messages are answered."""
        for reader in self._readers:
            reader.cancel()

    async def Attach(  # noqa: N802
        self, request: model_runner_pb2.AttachRequest, context: _Context
    ) -> model_runner_pb2.AttachResponse:
        """Claims the worker."""
        versions = request.contract_versions
        claim = await self._facade.attach(
            request.epoch, request.controller_id, versions.minimum, versions.maximum
        )
        return model_runner_pb2.AttachResponse(
            worker_info=convert.info_to_pb(claim.worker_info),
            contract_version=claim.contract_version,
            previous_epoch=claim.previous_epoch,
        )

    async def GetWorkerInfo(  # noqa: N802
        self, request: model_runner_pb2.GetWorkerInfoRequest, context: _Context
    ) -> model_runner_pb2.GetWorkerInfoResponse:
        """Returns the capability."""
        info = self._facade.worker_info()
        return model_runner_pb2.GetWorkerInfoResponse(worker_info=convert.info_to_pb(info))

    async def GetMemoryPool(  # noqa: N802
        self, request: model_runner_pb2.GetMemoryPoolRequest, context: _Context
    ) -> model_runner_pb2.GetMemoryPoolResponse:
        """Returns the KV pool."""
        pool = await self._facade.memory_pool()
        return model_runner_pb2.GetMemoryPoolResponse(memory_pool=convert.pool_to_pb(pool))

    async def Forward(  # noqa: N802
        self, request: model_runner_pb2.ForwardRequest, context: _Context
    ) -> model_runner_pb2.ForwardResponse:
        """Executes one plan."""
        result = await (await self._submit_forward(request, Pipeline()))
        return model_runner_pb2.ForwardResponse(result=convert.result_to_pb(result))

    async def Sample(  # noqa: N802
        self, request: model_runner_pb2.SampleRequest, context: _Context
    ) -> model_runner_pb2.SampleResponse:
        """Samples held rows."""
        result = await (await self._submit_sample(request, Pipeline()))
        return model_runner_pb2.SampleResponse(result=convert.result_to_pb(result))

    async def Execute(  # noqa: N802
        self,
        request_iterator: AsyncIterator[model_runner_pb2.ExecuteRequest],
        context: _Context,
    ) -> None:
        """The pipeline: a reader submits in order, this task answers in order.

        When the sender leaves, this task is cancelled, and with it the reader. What was submitted
        still runs; its results are dropped.
        """
        limits = self._facade.worker_info().capability.limits
        # While the sender leaves this many answers unread, we read no more messages.
        unanswered = asyncio.Semaphore(2 * limits.max_inflight_step_count)
        answers: asyncio.Queue[_Answer | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(request_iterator, answers, unanswered))
        reader.add_done_callback(lambda _: answers.put_nowait(None))
        self._readers.add(reader)
        try:
            while (answer := await answers.get()) is not None:
                result = convert.result_to_pb(await answer.result)
                await context.write(_response(answer.kind, result))
                unanswered.release()
            if not reader.cancelled():
                reader.result()  # raises what refused the last message
            elif self._facade.lifecycle.state is LifecycleState.DRAINING:
                raise WorkerDraining("the worker drains")
        finally:
            self._readers.discard(reader)
            reader.cancel()
            await asyncio.wait((reader,))

    async def _read(
        self,
        requests: AsyncIterator[model_runner_pb2.ExecuteRequest],
        answers: asyncio.Queue[_Answer | None],
        unanswered: asyncio.Semaphore,
    ) -> None:
        """Submits messages in order until the sender is done. Raises the first refusal."""
        pipeline = Pipeline()
        async for request in requests:
            await unanswered.acquire()
            match request.WhichOneof("message"):
                case "forward" as kind:
                    result = await self._submit_forward(request.forward, pipeline)
                case "sample" as kind:
                    result = await self._submit_sample(request.sample, pipeline)
                case None:
                    raise PlanInvalid("message", "neither forward nor sample")
                case unreachable:
                    assert_never(unreachable)
            answers.put_nowait(_Answer(kind, result))

    async def _submit_forward(
        self, request: model_runner_pb2.ForwardRequest, pipeline: Pipeline
    ) -> asyncio.Future[StepResult]:
        self._facade.lifecycle.require_serving()
        return await self._facade.submit(convert.forward_from_pb(request), pipeline)

    async def _submit_sample(
        self, request: model_runner_pb2.SampleRequest, pipeline: Pipeline
    ) -> asyncio.Future[StepResult]:
        vocabulary_size = self._facade.worker_info().capability.model.vocabulary_size
        return await self._facade.submit_sample(
            convert.sample_from_pb(request, vocabulary_size), pipeline
        )


def _response(kind: str, result: Any) -> model_runner_pb2.ExecuteResponse:
    if kind == "forward":
        return model_runner_pb2.ExecuteResponse(
            forward=model_runner_pb2.ForwardResponse(result=result)
        )
    return model_runner_pb2.ExecuteResponse(sample=model_runner_pb2.SampleResponse(result=result))
