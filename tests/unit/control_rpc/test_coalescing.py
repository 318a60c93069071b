"""Streams over loopback gRPC before a simulated worker: a token waits for nobody, none is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from bench.inprocess import InProcessWorker
from control_plane.core.tokens import Tokens
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.errors import status_of
from control_plane.rpc.inference_servicer import InferenceServicer
from control_plane.rpc.server import ControlServer, inference_service
from control_plane.rpc.turns import Turns
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import Delta, TokenStream
from control_plane.text.model_files import TextModel
from control_plane.text.processor import TextLimits, TextProcessor
from tests.simulation.virtual_time import VirtualLoop, run_virtual
from tests.support.simulated_tokens import expected_tokens
from twinplane.common.v1.types_pb2 import SamplingParameters, TokenIds
from twinplane.grpc.health import SettableReadiness
from twinplane.grpc.interceptors import StatusInterceptor
from twinplane.inference.v1 import inference_pb2_grpc
from twinplane.inference.v1.inference_pb2 import GenerateRequest, GenerateResponse, StopConditions
from worker_service.domain.capability import Limits
from worker_service.domain.sampling import SamplingParameters as WorkerSampling
from worker_service.facade import WorkerFacade
from worker_service.simulated.runner import (
    SimulatedLatency,
    SimulatedModel,
    SimulatedRunner,
)

VOCABULARY = 259
MODEL = SimulatedModel(
    name="tiny",
    vocabulary_size=VOCABULARY,
    limits=Limits(
        max_sequence_count=64,
        max_step_token_count=256,
        max_sequence_token_count=512,
        max_prompt_token_count=512,
    ),
    block_count=4096,
)
PATIENCE = 60.0


@asynccontextmanager
async def serving(
    text_model: TextModel,
    *,
    synchronous: bool,
    step_seconds: float = 0.0,
    sleep: Callable[[float], None] = time.sleep,
) -> AsyncIterator[tuple[str, Fleet]]:
    """The whole control plane over a worker in the same process; its address, and its fleet."""
    latency = SimulatedLatency(step_seconds, 0.0, 0.0, 0.0)
    facade = WorkerFacade(
        lambda: SimulatedRunner(MODEL, latency, sleep=sleep), worker_id="w", incarnation_id="i"
    )
    await facade.load()
    ready = asyncio.Event()
    fleet = Fleet(
        [InProcessWorker(facade)],
        ReplicaSettings(
            scheduling=SchedulingSettings(async_scheduling=not synchronous), check_invariants=True
        ),
        clock=time.monotonic,
        jitter=random.Random(0).random,
        metrics=Telemetry("test"),
        on_readiness=lambda is_ready: ready.set() if is_ready else ready.clear(),
    )
    names = itertools.count()
    text = TextProcessor(text_model, TextLimits(), None)
    servicer = InferenceServicer(
        fleet,
        text,
        clock=time.monotonic,
        new_seed=lambda: 0,
        new_request_id=lambda: f"r{next(names)}",
    )
    server = ControlServer(
        [inference_service(servicer)],
        SettableReadiness(),
        StatusInterceptor(status_of, lambda *call: None, lambda: "error"),
    )
    running = asyncio.create_task(fleet.run())
    try:
        await ready.wait()
        address = await server.start("127.0.0.1", 0, None)
        yield address, fleet
    finally:
        await server.stop(0.0)
        running.cancel()
        await asyncio.wait([running])
        await facade.close()
        text.close()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    """A client with a connection of its own."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(address, options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def asked(prompt: list[int], max_tokens: int) -> GenerateRequest:
    return GenerateRequest(
        token_ids=TokenIds(ids=prompt),
        sampling=SamplingParameters(temperature=0.0),
        stop=StopConditions(max_tokens=max_tokens, ignore_end_of_sequence=True),
    )


def right(prompt: list[int], count: int) -> list[int]:
    return expected_tokens(prompt, count, WorkerSampling(0.0, 0, 1.0, 0.0, 0), VOCABULARY)


def tokens_of(responses: list[GenerateResponse]) -> list[int]:
    """All tokens; checks that there is one start, one end and nothing empty between."""
    kinds = [response.WhichOneof("event") for response in responses]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    return [token for response in responses for token in response.delta.token_ids]


@pytest.mark.parametrize("synchronous", [True, False])
async def test_each_token_of_an_idle_stream_arrives_before_there_is_another(
    tiny_text: TextModel, synchronous: bool
) -> None:
    """The worker takes a step only when the client has the token of the one before: whoever held
    a token back until there are more would wait for ever."""
    steps = threading.Semaphore(1)
    prompt, count = [5, 6, 7], 40

    def take_step(seconds: float) -> None:
        assert steps.acquire(timeout=PATIENCE)

    async with (
        serving(tiny_text, synchronous=synchronous, step_seconds=1e6, sleep=take_step) as (
            address,
            _,
        ),
        connected(address) as stub,
        asyncio.timeout(PATIENCE),
    ):
        responses: list[GenerateResponse] = []
        try:
            async for response in stub.Generate(asked(prompt, count)):
                responses.append(response)
                if response.HasField("delta"):
                    steps.release()
        finally:
            steps.release(count)
    assert tokens_of(responses) == right(prompt, count)
    assert len(responses) == count + 2, "one message per token"


def test_what_is_ready_is_taken_at_the_same_moment_however_many_streams_there_are() -> None:
    """In virtual time every timer would show."""

    async def main(loop: VirtualLoop) -> None:
        turns = Turns()
        streams = [TokenStream(None, turns) for _ in range(256)]
        for round_number in range(1, 4):
            takers = [asyncio.create_task(stream.take()) for stream in streams]
            await asyncio.sleep(1.0)
            for stream in streams:
                stream.push(Tokens([round_number]), None)
            expected = [Delta("", Tokens([round_number]))] * len(streams)
            assert await asyncio.gather(*takers) == expected
            assert loop.time() == round_number

    run_virtual(main)


@pytest.mark.parametrize("synchronous", [True, False])
async def test_many_streams_lose_and_reorder_nothing(
    tiny_text: TextModel, synchronous: bool
) -> None:
    """Some read at once, some give way to others after each message."""
    prompts = [[index, *range(index)] for index in range(48)]
    count = 200

    async def read(address: str, index: int) -> list[int]:
        async with connected(address) as stub:
            responses = []
            async for response in stub.Generate(asked(prompts[index], count)):
                responses.append(response)
                for _ in range(index % 4):
                    await asyncio.sleep(0)
        assert len(responses) <= count + 2
        return tokens_of(responses)

    async with (
        serving(tiny_text, synchronous=synchronous) as (address, fleet),
        asyncio.timeout(PATIENCE),
    ):
        answers = await asyncio.gather(*(read(address, index) for index in range(len(prompts))))
        stats = fleet.replicas[0].stats()
        assert stats is not None
        assert stats.generated_tokens == len(prompts) * count
    assert answers == [right(prompt, count) for prompt in prompts]
