"""A worker in the same process as its controller, for tests and benchmarks: no socket, same bytes.

Every message is serialised and parsed as if it crossed the wire, so what is proved here about the
contract holds there. The planes still know only the contract; this file knows both.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from google.protobuf.message import Message

from control_plane.core.plan import Message as PlanMessage
from control_plane.core.plan import StepResult
from control_plane.rpc import convert as control_convert
from control_plane.shell.ports import (
    Admit,
    Attachment,
    RefusalReason,
    WorkerLost,
    WorkerRefused,
)
from twinplane.worker.v1 import model_runner_pb2
from worker_service.domain.errors import WorkerError
from worker_service.domain.plan import CONTRACT_VERSION
from worker_service.domain.plan import StepResult as WorkerStepResult
from worker_service.facade import Pipeline, WorkerFacade
from worker_service.rpc import convert as worker_convert

_Message = TypeVar("_Message", bound=Message)


class InProcessWorker:
    """The controller's Worker port over a facade on the same event loop.

    The facade stays its owner's to load and close. `sent_bytes` and `received_bytes` count the
    messages of the step pipeline.
    """

    def __init__(self, facade: WorkerFacade, *, controller_id: str = "in-process") -> None:
        self.sent_bytes = 0
        self.received_bytes = 0
        self._facade = facade
        self._controller_id = controller_id
        self._last_epoch = 0
        self._pipeline: Pipeline | None = None
        self._results: asyncio.Queue[asyncio.Future[WorkerStepResult]] = asyncio.Queue()

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        """Claims the worker, by default one epoch above every epoch seen."""
        await self.detach()
        try:
            if admit is not None:
                info = worker_convert.info_to_pb(self._facade.worker_info())
                admit(control_convert.info_from_pb(_crossed(info)))
            if epoch is None:
                epoch = max(self._facade.worker_info().epoch, self._last_epoch) + 1
            claim = await self._facade.attach(
                epoch, self._controller_id, CONTRACT_VERSION, CONTRACT_VERSION
            )
            pool = await self._facade.memory_pool()
        except WorkerError as error:
            raise _refusal(error) from error
        self._last_epoch = epoch
        self._pipeline = Pipeline()
        self._results = asyncio.Queue()
        attached = model_runner_pb2.AttachResponse(
            worker_info=worker_convert.info_to_pb(claim.worker_info),
            previous_epoch=claim.previous_epoch,
        )
        return control_convert.attachment_from_pb(
            _crossed(attached), _crossed(worker_convert.pool_to_pb(pool))
        )

    async def send(self, message: PlanMessage) -> None:
        """Submits a message; waits only for room in the worker's queue."""
        if self._pipeline is None:
            raise WorkerLost("not attached")
        sent = control_convert.message_to_pb(message)
        self.sent_bytes += sent.ByteSize()
        try:
            self._results.put_nowait(await self._submit(_crossed(sent), self._pipeline))
        except WorkerError as error:
            raise _refusal(error) from error

    async def _submit(
        self, request: model_runner_pb2.ExecuteRequest, pipeline: Pipeline
    ) -> asyncio.Future[WorkerStepResult]:
        if request.HasField("forward"):
            return await self._facade.submit(
                worker_convert.forward_from_pb(request.forward), pipeline
            )
        vocabulary_size = self._facade.worker_info().capability.model.vocabulary_size
        return await self._facade.submit_sample(
            worker_convert.sample_from_pb(request.sample, vocabulary_size), pipeline
        )

    async def receive(self) -> StepResult:
        """The result of the next message, in order."""
        if self._pipeline is None:
            raise WorkerLost("not attached")
        future = await self._results.get()
        try:
            result = await future
        except WorkerError as error:
            raise _refusal(error) from error
        message = worker_convert.result_to_pb(result)
        self.received_bytes += message.ByteSize()
        return control_convert.result_from_pb(_crossed(message))

    async def ping(self) -> None:
        """Nothing separates this worker from its controller."""

    async def detach(self) -> None:
        """Forgets the pipeline; what was submitted is still executed."""
        self._pipeline = None
        while not self._results.empty():
            self._results.get_nowait().cancel()


def _refusal(error: WorkerError) -> WorkerRefused:
    return WorkerRefused(RefusalReason(error.reason), str(error), error.step_id, error.rows)


def _crossed(message: _Message) -> _Message:
    """What arrives of a message on the other side of a wire."""
    return type(message).FromString(message.SerializeToString())
