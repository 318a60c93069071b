"""ModelRunnerService over the facade. Forward and Sample do what Execute does, once per call."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_never

import grpc

from twinplane.process.logs import fields
from twinplane.worker.v1 import model_runner_pb2, model_runner_pb2_grpc
from worker_service.adapter_loading import AdapterLoading
from worker_service.domain.errors import PlanInvalid, StaleEpoch, WorkerDraining, WorkerError
from worker_service.domain.plan import StepResult
from worker_service.facade import Pipeline, WorkerFacade, named
from worker_service.lifecycle import LifecycleState
from worker_service.rpc import convert
from worker_service.rpc.adapters_servicer import AdapterMethods
from worker_service.rpc.rendezvous import rendezvous_from_pb
from worker_service.rpc.weights_servicer import WeightsMethods

_logger = logging.getLogger(__name__)

_LEAVING = (LifecycleState.FINISHING, LifecycleState.DRAINING)

_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class _Answer:
    """The result of one pipeline message, and the kind of answer that carries it."""

    kind: str
    result: asyncio.Future[StepResult]


@dataclass(slots=True, eq=False)
class _Stream:
    """An open Execute stream. `answers` ends with None; `room` bounds what is unanswered.

    `fenced` says who has claimed the worker since, empty for nobody.
    """

    answers: asyncio.Queue[_Answer | None]
    room: asyncio.Semaphore
    read_count: int = 0
    answered_count: int = 0
    fenced: str = ""


class ModelRunnerServicer(
    WeightsMethods, AdapterMethods, model_runner_pb2_grpc.ModelRunnerServiceServicer
):
    """The worker's RPCs. Refusals are raised unchanged: it needs StatusInterceptor in front."""

    def __init__(self, facade: WorkerFacade, weights_root: Path | None = None) -> None:
        """`weights_root`: the folder below which a controller may name files."""
        self._facade = facade
        self._adapters = AdapterLoading(facade, weights_root)
        self._streams: dict[_Stream, asyncio.Task[None]] = {}
        """Each open Execute stream, and what reads it."""
        self._read_count = 0
        self._one_ended = asyncio.Event()
        self._last_was_refused = False
        """Whether the Execute stream that ended last had brought a message that was refused."""

    async def released(self, quiet_seconds: float) -> None:
        """Returns once no controller needs this worker, which is finishing.

        That is so when it has closed its Execute stream, and when for `quiet_seconds` it has sent
        nothing and waited for nothing. One whose stream was refused may come back meanwhile.
        """
        while self._streams or self._last_was_refused:
            seen = self._read_count
            self._one_ended.clear()
            try:
                async with asyncio.timeout(quiet_seconds):
                    await self._one_ended.wait()
            except TimeoutError:
                if seen == self._read_count and not self._has_unanswered():
                    return

    def end_streams(self) -> None:
        """Stops reading every Execute stream. A stream ends once its messages are answered."""
        for reader in self._streams.values():
            reader.cancel()

    async def Attach(  # noqa: N802
        self, request: model_runner_pb2.AttachRequest, context: _Context
    ) -> model_runner_pb2.AttachResponse:
        """Claims the worker."""
        versions = request.contract_versions
        claim = await self._facade.attach(
            request.epoch,
            request.controller_id,
            versions.minimum,
            versions.maximum,
            rendezvous_from_pb(request, self._facade.worker_info().capability.ranks),
        )
        self._fence(request.epoch, request.controller_id)
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
        room = asyncio.Semaphore(2 * limits.max_inflight_step_count)
        stream = _Stream(asyncio.Queue(), room)
        reader = asyncio.create_task(self._read(request_iterator, stream))
        reader.add_done_callback(lambda _: stream.answers.put_nowait(None))
        self._streams[stream] = reader
        self._last_was_refused = False
        try:
            await self._answer(stream, context)
            if not reader.cancelled():
                reader.result()  # raises what refused the last message
            elif stream.fenced:
                raise StaleEpoch(stream.fenced)
            elif self._facade.lifecycle.state is LifecycleState.DRAINING:
                raise WorkerDraining("the worker drains")
        except WorkerError:
            self._last_was_refused = True
            raise
        finally:
            del self._streams[stream]
            self._one_ended.set()
            reader.cancel()
            await asyncio.wait((reader,))

    async def _answer(self, stream: _Stream, context: _Context) -> None:
        """Answers in order until nothing more was read. Raises the first refusal of the device."""
        while (answer := await stream.answers.get()) is not None:
            result = convert.result_to_pb(await answer.result)
            response = _response(answer.kind, result)
            response.is_leaving = self._facade.lifecycle.state in _LEAVING
            await context.write(response)
            stream.answered_count += 1
            stream.room.release()

    async def _read(
        self, requests: AsyncIterator[model_runner_pb2.ExecuteRequest], stream: _Stream
    ) -> None:
        """Submits messages in order until the sender is done. Raises the first refusal."""
        pipeline = Pipeline()
        async for request in requests:
            self._read_count += 1
            stream.read_count += 1
            await stream.room.acquire()
            match request.WhichOneof("message"):
                case "forward" as kind:
                    result = await self._submit_forward(request.forward, pipeline)
                case "sample" as kind:
                    result = await self._submit_sample(request.sample, pipeline)
                case None:
                    raise PlanInvalid("message", "neither forward nor sample")
                case unreachable:
                    assert_never(unreachable)
            stream.answers.put_nowait(_Answer(kind, result))

    def _fence(self, epoch: int, controller_id: str) -> None:
        """Ends the streams of earlier claims, whose controllers would not notice while they have
        nothing to run.
        """
        if not self._streams:
            return
        _logger.warning(
            "a claim ended another controller's stream",
            extra=fields(epoch=epoch, controller_id=controller_id),
        )
        for stream, reader in self._streams.items():
            stream.fenced = f"{named(controller_id)} has claimed the worker since"
            reader.cancel()

    def _has_unanswered(self) -> bool:
        return any(stream.answered_count < stream.read_count for stream in self._streams)

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
