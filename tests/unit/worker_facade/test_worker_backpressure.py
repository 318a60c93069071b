"""The Execute pipeline when its client leaves, or is faster or slower than the worker."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tests.support.worker_rig import (
    Device,
    execute,
    first,
    following,
    forward,
    result_of,
    serving,
    until,
    wanted,
    works,
)
from twinplane.worker.v1 import model_runner_pb2
from worker_service.rpc.servicer import ModelRunnerServicer

SAMPLE_1 = model_runner_pb2.SampleRequest(epoch=1, step_id=1, rows=[0])
SAMPLE_2 = model_runner_pb2.SampleRequest(epoch=1, step_id=2, rows=[0])


@pytest.mark.parametrize("gated", [True, False], ids=["while a step runs", "while idle"])
async def test_a_client_that_leaves_does_not_hold_the_worker(gated):
    device = Device(*([1] if gated else []))
    async with serving(device) as rig:
        await rig.attach(1)
        call = rig.stub.Execute()
        for step_id in range(1, 4):
            await call.write(execute(first() if step_id == 1 else following(step_id)))
        if gated:
            await device.entered()
        else:
            for _ in range(3):
                await call.read()
        call.cancel()
        device.open()
        await works(rig, 2)


async def test_a_client_whose_connection_breaks_goes_on_with_the_kept_results():
    async with serving() as rig:
        await rig.attach()
        async with grpc.aio.insecure_channel(rig.address) as channel:
            execute_method = channel.stream_stream(
                "/twinplane.worker.v1.ModelRunnerService/Execute",
                request_serializer=model_runner_pb2.ExecuteRequest.SerializeToString,
                response_deserializer=model_runner_pb2.ExecuteResponse.FromString,
            )
            call = execute_method()
            await call.write(execute(first()))
            assert list(result_of(await call.read()).tokens) == wanted(1)
            await call.write(execute(following(2)))
        # Whether step 2 ran or not, the same plan on a new stream gets its tokens.
        call = rig.stub.Execute()
        await call.write(execute(following(2)))
        await call.write(execute(following(3)))
        tokens = [*result_of(await call.read()).tokens, *result_of(await call.read()).tokens]
        assert tokens == wanted(3)[1:]
        await call.done_writing()


async def test_a_full_queue_holds_the_sender_back_and_loses_nothing():
    device = Device(1)
    async with serving(device) as rig:
        await rig.attach()
        limit = rig.facade.worker_info().capability.limits.max_inflight_step_count
        submitted = 0
        submit = rig.facade.submit

        async def counting(plan, pipeline):
            nonlocal submitted
            future = await submit(plan, pipeline)
            submitted += 1
            return future

        rig.facade.submit = counting
        call = rig.stub.Execute()
        writer = asyncio.create_task(write_all(call, 1 + 3 * limit))
        await device.entered()
        await until(lambda: submitted == limit)
        await asyncio.sleep(0.05)
        assert submitted == limit
        # Unary calls wait as well.
        request = model_runner_pb2.GetMemoryPoolRequest()
        unary = asyncio.ensure_future(rig.stub.GetMemoryPool(request))
        await asyncio.sleep(0.05)
        assert not unary.done()
        device.open()
        tokens = [t async for response in call for t in result_of(response).tokens]
        await writer
        assert tokens == wanted(1 + 3 * limit)
        assert (await unary).memory_pool.used_block_count == 10


async def write_all(call, count):
    for step_id in range(1, count + 1):
        await call.write(execute(first() if step_id == 1 else following(step_id)))
    await call.done_writing()


async def test_answers_nobody_reads_stop_the_reading():
    async with serving() as rig:
        await rig.attach()
        limit = rig.facade.worker_info().capability.limits.max_inflight_step_count
        taken = 0

        async def requests():
            nonlocal taken
            for step_id in range(1, 1000):
                taken += 1
                yield execute(forward(step_id))

        class Unread:
            """A call whose other side reads nothing."""

            async def write(self, response):
                await asyncio.Event().wait()

        call = asyncio.create_task(ModelRunnerServicer(rig.facade).Execute(requests(), Unread()))
        await until(lambda: taken > 2 * limit)
        await asyncio.sleep(0.05)
        assert taken == 2 * limit + 1
        call.cancel()
        await asyncio.wait((call,))
        await works(rig, 2)
