"""A simulated worker behind a real loopback server, and short names for the contract's messages."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.support.provoked_runner import Provoke, ProvokedRunner
from tests.support.simulated_tokens import expected_tokens
from twinplane.common.v1 import types_pb2
from twinplane.worker.v1 import info_pb2, model_runner_pb2, model_runner_pb2_grpc, step_pb2
from worker_service.domain.capability import Limits
from worker_service.domain.plan import RowFault, StepPlan
from worker_service.domain.sampling import SamplingParameters
from worker_service.facade import StepMetrics, WorkerFacade
from worker_service.rpc.server import WorkerServer
from worker_service.runner.interface import Runner
from worker_service.simulated.runner import (
    SimulatedLatency,
    SimulatedModel,
    SimulatedRunner,
)
from worker_service.weight_updates import UpdateMetrics

VOCABULARY = 101
BLOCK_SIZE = 4
MODEL = SimulatedModel(
    name="simulated",
    vocabulary_size=VOCABULARY,
    limits=Limits(
        max_sequence_count=8,
        max_step_token_count=64,
        max_sequence_token_count=40,
        max_prompt_token_count=40,
    ),
    block_count=64,
    block_size=BLOCK_SIZE,
)
NO_LATENCY = SimulatedLatency(0.0, 0.0, 0.0, 0.0)
SAMPLE = step_pb2.OUTPUT_KIND_SAMPLE
HOLD = step_pb2.OUTPUT_KIND_HOLD
NONE = step_pb2.OUTPUT_KIND_NONE
PATIENCE = 10.0


def simulated_runner(model: SimulatedModel = MODEL) -> SimulatedRunner:
    """A runner that takes no time."""
    return SimulatedRunner(model, NO_LATENCY, sleep=lambda seconds: None)


WEIGHTS = simulated_runner().capability().weight_version


class Device:
    """The device as a test sees it: what was executed, and a gate in front of chosen steps."""

    def __init__(self, *gated: int, failing: Sequence[int] = ()) -> None:
        self.executed: list[tuple[int, int]] = []
        self._gated = frozenset(gated)
        self._failing = frozenset(failing)
        self._entered = threading.Event()
        self._opened = threading.Event()

    def __call__(self, plan: StepPlan) -> Sequence[RowFault]:
        self.executed.append((plan.epoch, plan.step_id))
        if plan.step_id in self._gated:
            self._entered.set()
            assert self._opened.wait(PATIENCE)
        if plan.step_id in self._failing:
            raise MemoryError("the device is out of memory")
        return ()

    async def entered(self) -> None:
        """Waits until a gated step runs."""
        assert await asyncio.to_thread(self._entered.wait, PATIENCE)

    def open(self) -> None:
        self._opened.set()


@dataclass(frozen=True, slots=True)
class Rig:
    """A worker that listens, and a client's stub."""

    facade: WorkerFacade
    server: WorkerServer
    address: str
    channel: grpc.aio.Channel
    stub: Any

    async def attach(self, epoch: int = 1) -> model_runner_pb2.AttachResponse:
        return await self.stub.Attach(attach_request(epoch))

    async def forward(self, *arguments: Any, **keywords: Any) -> step_pb2.StepResult:
        return (await self.stub.Forward(forward(*arguments, **keywords))).result


@asynccontextmanager
async def serving(
    provoke: Provoke = lambda plan: (),
    build: Callable[[], Runner] | None = None,
    load: bool = True,
    metrics: StepMetrics | None = None,
    weights_root: Path | None = None,
    update_metrics: UpdateMetrics | None = None,
) -> AsyncIterator[Rig]:
    """A rig; taken down whole, whatever the test left open."""
    facade = WorkerFacade(
        build or (lambda: ProvokedRunner(simulated_runner(), provoke)),
        worker_id="worker-7",
        incarnation_id="life-1",
        metrics=metrics,
        update_metrics=update_metrics,
    )
    server = WorkerServer(facade, weights_root=weights_root)
    address = await server.start("127.0.0.1", 0)
    try:
        if load:
            await facade.load()
        async with grpc.aio.insecure_channel(address) as channel:
            stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
            yield Rig(facade, server, address, channel, stub)
    finally:
        facade.drain()
        server.end_streams()
        await asyncio.wait_for(facade.close(), PATIENCE)
        await server.stop(1.0)


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that no event tells of."""
    for _ in range(int(PATIENCE / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
    pytest.fail("waited in vain")


def attach_request(epoch: int, minimum: int = 1, maximum: int = 1) -> Any:
    return model_runner_pb2.AttachRequest(
        epoch=epoch,
        controller_id="test",
        contract_versions=info_pb2.ContractVersionRange(minimum=minimum, maximum=maximum),
    )


def added(
    row: int,
    tokens: Sequence[int],
    blocks: Sequence[int],
    computed: int = 0,
    temperature: float = 0.0,
    seed: int = 7,
    output: step_pb2.OutputKind = SAMPLE,
    prompt_token_count: int | None = None,
) -> step_pb2.AddedSequence:
    return step_pb2.AddedSequence(
        row=row,
        token_ids=tokens,
        prompt_token_count=len(tokens) if prompt_token_count is None else prompt_token_count,
        output=output,
        sampling=types_pb2.SamplingParameters(temperature=temperature, seed=seed),
        block_ids=blocks,
        computed_token_count=computed,
    )


def forward(
    step_id: int,
    *,
    epoch: int = 1,
    add: Sequence[step_pb2.AddedSequence] = (),
    remove: Sequence[int] = (),
    digest: str = WEIGHTS.digest,
    generation: int = 1,
    **columns: Sequence[int],
) -> model_runner_pb2.ForwardRequest:
    """A request; `columns` are those of ScheduledRows."""
    return model_runner_pb2.ForwardRequest(
        plan=step_pb2.StepPlan(
            epoch=epoch,
            step_id=step_id,
            weight_version=types_pb2.WeightVersion(generation=generation, digest=digest),
            removed_rows=remove,
            added=add,
            scheduled=step_pb2.ScheduledRows(**columns) if columns else None,
        )
    )


PROMPT = (5, 17, 3, 42, 99, 0)


def first(
    step_id: int = 1,
    *,
    epoch: int = 1,
    output: step_pb2.OutputKind = SAMPLE,
    **keywords: Any,
) -> model_runner_pb2.ForwardRequest:
    """Row 0 enters with PROMPT and twenty blocks' room, and is computed whole."""
    return forward(
        step_id,
        epoch=epoch,
        add=[added(0, PROMPT, range(1, 11), output=output)],
        rows=[0],
        start_positions=[0],
        token_counts=[len(PROMPT)],
        **keywords,
    )


def following(step_id: int, *, epoch: int = 1, **keywords: Any) -> Any:
    """Row 0's next token, from the step before; `first` was step 1."""
    return forward(
        step_id,
        epoch=epoch,
        rows=[0],
        start_positions=[len(PROMPT) + step_id - 2],
        source_step_distances=[1],
        **keywords,
    )


def wanted(count: int, temperature: float = 0.0, seed: int = 7, salt: int = 0) -> list[int]:
    """What row 0 samples in `count` steps; `salt` is the weights'."""
    sampling = SamplingParameters(temperature, 0, 1.0, 0.0, seed)
    return expected_tokens(PROMPT, count, sampling, VOCABULARY, salt=salt)


def execute(message: Any) -> model_runner_pb2.ExecuteRequest:
    """A plan, a sampling or a ready message as a message of the pipeline."""
    if isinstance(message, model_runner_pb2.ExecuteRequest):
        return message
    if isinstance(message, model_runner_pb2.ForwardRequest):
        return model_runner_pb2.ExecuteRequest(forward=message)
    return model_runner_pb2.ExecuteRequest(sample=message)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A status, unpacked."""

    code: grpc.StatusCode
    reason: str
    field: str
    message: str
    retry_after: float | None
    metadata: dict[str, str]


async def refusal(call: Awaitable[Any]) -> Refusal:
    """The status that a call must end with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return unpack(raised.value)


def unpack(error: grpc.aio.AioRpcError) -> Refusal:
    status = rpc_status.from_call(error)
    assert status is not None, f"{error.code()} without details: {error.details()}"
    info, request = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    field, retry_after = "", None
    for detail in status.details:
        if detail.Is(info.DESCRIPTOR):
            detail.Unpack(info)
        elif detail.Is(request.DESCRIPTOR):
            detail.Unpack(request)
            (violation,) = request.field_violations
            field = violation.field
            assert violation.description
        elif detail.Is(retry.DESCRIPTOR):
            detail.Unpack(retry)
            retry_after = retry.retry_delay.ToTimedelta().total_seconds()
    assert info.domain == "twinplane"
    metadata = dict(info.metadata)
    return Refusal(error.code(), info.reason, field, status.message, retry_after, metadata)


def result_of(response: Any) -> Any:
    """The result in an answer of Execute, whatever it answers."""
    return getattr(response, response.WhichOneof("message")).result


async def works(rig: Rig, epoch: int) -> None:
    """The worker takes a new claim and samples what it should."""
    await rig.attach(epoch)
    result = (await rig.stub.Forward(first(epoch=epoch))).result
    assert list(result.tokens) == wanted(1)
