"""The Execute pipeline over loopback gRPC: order, refusals, claims, ends."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace

import grpc
import pytest

from tests.support.worker_rig import (
    HOLD,
    MODEL,
    NO_LATENCY,
    NONE,
    PATIENCE,
    Device,
    attach_request,
    execute,
    first,
    following,
    forward,
    refusal,
    result_of,
    serving,
    unpack,
    until,
    wanted,
    works,
)
from twinplane.worker.v1 import model_runner_pb2
from worker_service.domain.errors import StaleEpoch, StepGap
from worker_service.facade import Pipeline
from worker_service.rpc import convert
from worker_service.simulated.runner import SimulatedRunner

SAMPLE_1 = model_runner_pb2.SampleRequest(epoch=1, step_id=1, rows=[0])
SAMPLE_2 = model_runner_pb2.SampleRequest(epoch=1, step_id=2, rows=[0])


async def answers_until_refused(call):
    """What the stream answered, and how it ended."""
    answers: list[int] = []
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        while True:
            answers.append(result_of(await call.read()).step_id)
    return answers, unpack(raised.value)


async def test_two_plans_in_flight_are_answered_in_order():
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach()
        call = rig.stub.Execute()
        await call.write(execute(first()))
        await call.write(execute(following(2)))
        await device.entered()
        assert device.executed == [(1, 1)]
        device.open()
        tokens = []
        for step_id in range(1, 20):
            result = result_of(await call.read())
            assert result.step_id == step_id
            tokens += result.tokens
            await call.write(execute(following(step_id + 2)))
        assert tokens == wanted(19)
        await call.done_writing()
        assert [result_of(await call.read()).step_id for _ in range(2)] == [20, 21]
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_claim_names_the_claim_before_it():
    async with serving() as rig:
        assert (await rig.attach(3)).previous_epoch == 0
        assert (await rig.attach(4)).previous_epoch == 3
        assert (await refusal(rig.attach(4))).reason == "STALE_EPOCH"
        assert (await rig.attach(9)).previous_epoch == 4


async def test_the_stream_says_what_unary_calls_say():
    plans = [first(), following(2), following(3), forward(4, remove=[0])]
    async with serving() as rig:
        await rig.attach(1)
        unary = [(await rig.stub.Forward(plan)).result for plan in plans]
        # The same plans again, on a stream: the kept results, to the byte.
        streamed = [result_of(r) async for r in rig.stub.Execute(map(execute, plans))]
        assert streamed == unary
        # And executed by a stream, under another claim.
        await rig.attach(2)
        for plan in plans:
            plan.plan.epoch = 2
        streamed = [result_of(r) async for r in rig.stub.Execute(map(execute, plans))]
        for result in (*unary, *streamed):
            result.ClearField("timings")
            result.ClearField("epoch")
        assert streamed == unary


async def test_held_steps_and_their_sampling_share_the_pipeline():
    messages = []
    for step_id in range(1, 6):
        messages.append(first(output=HOLD) if step_id == 1 else following(step_id))
        messages.append(model_runner_pb2.SampleRequest(epoch=1, step_id=step_id, rows=[0]))
    async with serving() as rig:
        await rig.attach()
        responses = [r async for r in rig.stub.Execute(map(execute, messages))]
        kinds = [response.WhichOneof("message") for response in responses]
        assert kinds == ["forward", "sample"] * 5
        assert [t for r in responses for t in result_of(r).tokens] == wanted(5)


@pytest.mark.parametrize(
    ("messages", "answered", "reason"),
    [
        # A gap on the device, and what would have filled it behind it.
        ([first(), following(3), following(2)], [1], "STEP_GAP"),
        # A conflict does not stop the count, yet nothing after it may run.
        ([first(), first(output=NONE), following(2)], [1], "STEP_CONFLICT"),
        ([first(), SAMPLE_1, following(2)], [1], "ROW_NOT_HELD"),
        ([first(output=HOLD), following(2), SAMPLE_1], [1], "PLAN_MISMATCH"),
        ([first(), forward(2, rows=[5], start_positions=[0])], [1], "PLAN_MISMATCH"),
        ([first(), forward(2, rows=[0, 1], start_positions=[0]), following(2)], [1],
         "INVALID_PLAN"),
        ([first(), following(2, epoch=9), following(2)], [1], "STALE_EPOCH"),
        ([first(), model_runner_pb2.ExecuteRequest(), following(2)], [1], "INVALID_PLAN"),
    ],
)  # fmt: skip
async def test_a_refused_message_ends_the_stream_and_nothing_after_it_runs(
    messages, answered, reason
):
    device = Device()
    async with serving(device) as rig:
        await rig.attach()
        answers, refused = await answers_until_refused(rig.stub.Execute(map(execute, messages)))
        assert (answers, refused.reason) == (answered, reason)
        assert device.executed == [(1, 1)]
        # What follows was not consumed: it goes on from there.
        if messages[0].plan.added[0].output == HOLD:
            await rig.stub.Sample(SAMPLE_1)
            await rig.stub.Forward(following(2))
            result = (await rig.stub.Sample(SAMPLE_2)).result
            assert list(result.tokens) == wanted(2)[1:]
            return
        assert list((await rig.stub.Forward(following(2))).result.tokens) == wanted(2)[1:]


async def test_a_refusal_behind_a_running_step_waits_for_its_answer():
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach()
        call = rig.stub.Execute()
        await call.write(execute(first()))
        await device.entered()
        await call.write(execute(following(2, epoch=7)))
        device.open()
        answers, refused = await answers_until_refused(call)
        assert (answers, refused.reason) == ([1], "STALE_EPOCH")


async def test_a_message_refused_at_once_refuses_none_before_it():
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach()
        pipeline = Pipeline()
        plans = [convert.forward_from_pb(p) for p in (first(), following(2), following(3))]
        futures = [await rig.facade.submit(plan, pipeline) for plan in plans[:2]]
        await device.entered()
        with pytest.raises(StaleEpoch):
            await rig.facade.submit(replace(plans[2], epoch=7), pipeline)
        with pytest.raises(StepGap):
            await rig.facade.submit(plans[2], pipeline)
        device.open()
        assert [token for f in futures for token in (await f).tokens.tolist()] == wanted(2)
        assert device.executed == [(1, 1), (1, 2)]


async def test_a_new_claim_fences_plans_that_wait_in_the_pipeline():
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach(1)
        old = rig.stub.Execute()
        for message in (first(), following(2), following(3)):
            await old.write(execute(message))
        await device.entered()
        claim = asyncio.ensure_future(rig.attach(2))
        await until(lambda: rig.facade.worker_info().epoch == 2)
        assert not claim.done(), "the claim waits for the running step"
        device.open()
        assert (await claim).worker_info.epoch == 2
        answers, refused = await answers_until_refused(old)
        assert (answers, refused.reason) == ([1], "STALE_EPOCH")
        result = (await rig.stub.Forward(first(epoch=2))).result
        assert list(result.tokens) == wanted(1)
        assert device.executed == [(1, 1), (2, 1)]


@pytest.mark.parametrize("controller_id", ["other", "x" * 100_000, "ü\n\x00", ""])
@pytest.mark.parametrize("step_count", [0, 1, 3])
async def test_an_idle_controller_hears_of_another_claim(step_count: int, controller_id: str):
    """It has nothing to send, and would not notice."""
    async with serving() as rig:
        await rig.attach(1)
        old = rig.stub.Execute()
        await old.wait_for_connection()
        for step_id in range(1, step_count + 1):
            await old.write(execute(first() if step_id == 1 else following(step_id)))
            assert result_of(await old.read()).step_id == step_id
        if step_count == 0:
            await rig.stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest())
        request = attach_request(2)
        request.controller_id = controller_id
        await rig.stub.Attach(request)
        answers, refused = await answers_until_refused(old)
        assert (answers, refused.reason) == ([], "STALE_EPOCH")
        assert repr(controller_id[:64]) in refused.message
        assert len(refused.message) < 200
        await works(rig, 3)


async def test_a_claim_overtaken_by_a_newer_one_is_refused():
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach(1)
        running = asyncio.ensure_future(rig.stub.Forward(first()))
        await device.entered()
        overtaken = asyncio.ensure_future(refusal(rig.attach(2)))
        await until(lambda: rig.facade.worker_info().epoch == 2)
        newest = asyncio.ensure_future(rig.attach(3))
        await until(lambda: rig.facade.worker_info().epoch == 3)
        device.open()
        await running
        assert (await overtaken).reason == "STALE_EPOCH"
        assert (await newest).worker_info.epoch == 3


class SlowReset(SimulatedRunner):
    """Its reset waits to be let."""

    def __init__(self) -> None:
        super().__init__(MODEL, NO_LATENCY)
        self.entered, self.opened = threading.Event(), threading.Event()

    def reset(self) -> None:
        self.entered.set()
        assert self.opened.wait(PATIENCE)
        super().reset()


async def test_a_claim_overtaken_while_it_clears_the_batch_is_refused():
    runner = SlowReset()
    async with serving(build=lambda: runner) as rig:
        overtaken = asyncio.ensure_future(refusal(rig.attach(1)))
        assert await asyncio.to_thread(runner.entered.wait, PATIENCE)
        newest = asyncio.ensure_future(rig.attach(2))
        await until(lambda: rig.facade.worker_info().epoch == 2)
        runner.opened.set()
        assert (await overtaken).reason == "STALE_EPOCH"
        assert (await newest).worker_info.epoch == 2


async def test_a_failing_step_ends_the_epoch_and_a_new_claim_heals_it():
    device = Device(failing=[2])
    async with serving(device) as rig:
        await rig.attach(1)
        messages = map(execute, (first(), following(2), following(3)))
        answers, refused = await answers_until_refused(rig.stub.Execute(messages))
        assert answers == [1]
        assert (refused.code, refused.reason) == (grpc.StatusCode.INTERNAL, "RUNNER_FAILED")
        for step_id in (2, 2):
            refused = await refusal(rig.stub.Forward(following(step_id)))
            assert refused.code is grpc.StatusCode.INTERNAL
        assert device.executed == [(1, 1), (1, 2)]
        await works(rig, 2)


async def test_closing_the_stream_early_answers_everything():
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach()
        call = rig.stub.Execute()
        await call.write(execute(first()))
        await call.write(execute(following(2)))
        await call.done_writing()
        await device.entered()
        device.open()
        assert [result_of(response).step_id async for response in call] == [1, 2]


async def test_an_empty_stream_ends_well():
    async with serving() as rig:
        call = rig.stub.Execute()
        await call.done_writing()
        assert [response async for response in call] == []
        assert await call.code() is grpc.StatusCode.OK
