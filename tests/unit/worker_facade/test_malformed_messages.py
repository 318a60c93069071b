"""Bytes that are no message, on the worker's side: every RPC, streams too, and health."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message

from tests.support.malformed import broken
from tests.support.weight_updates import update_message
from tests.support.worker_rig import Rig, attach_request, first, serving
from twinplane.grpc.interceptors import MALFORMED_LINES
from twinplane.grpc.status import read
from twinplane.worker.v1 import model_runner_pb2 as pb
from twinplane.worker.v1 import weights_pb2

SERVICE = "/twinplane.worker.v1.ModelRunnerService"
WHOLE: dict[str, Message] = {
    "Attach": attach_request(1),
    "Forward": first(),
    "Sample": pb.SampleRequest(),
    "GetWorkerInfo": pb.GetWorkerInfoRequest(),
    "GetMemoryPool": pb.GetMemoryPoolRequest(),
    "Execute": pb.ExecuteRequest(forward=first()),
    "PrepareWeights": update_message(disk=weights_pb2.DiskSource(path="new")),
    "CommitWeights": weights_pb2.CommitWeightsRequest(epoch=1, update_id="u", digest="d"),
    "AbortWeights": weights_pb2.AbortWeightsRequest(epoch=1, update_id="u"),
    "ListTensors": weights_pb2.ListTensorsRequest(),
    "Sleep": weights_pb2.SleepRequest(epoch=1, tags=[weights_pb2.SLEEP_TAG_KV]),
    "Wake": weights_pb2.WakeRequest(epoch=1, tags=[weights_pb2.SLEEP_TAG_KV]),
}


async def failure(call: Any) -> grpc.RpcError:
    """What a call with streams ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call.read()
    return error.value


@pytest.mark.parametrize("method", WHOLE)
async def test_fifty_ways_to_break_a_message(method: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    whole = WHOLE[method]
    async with serving() as rig:
        await rig.attach()
        caplog.clear()
        send = rig.channel.stream_stream(f"{SERVICE}/{method}")
        variants = list(broken(whole.SerializeToString(), type(whole), 50, seed=12))
        for raw in variants:
            status = read(await failure(send(iter([raw]))))
            assert (status.code, status.reason) == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "MALFORMED_MESSAGE",
            )
            assert len(status.violations) == 1
        # One line for each, up to so many a second.
        assert {record.message for record in caplog.records} == {"a message was malformed"}
        assert min(MALFORMED_LINES, len(variants)) <= len(caplog.records) <= len(variants)
        assert all(record.exc_info is None for record in caplog.records)
        await _still_serves(rig)


async def _still_serves(rig: Rig) -> None:
    answer = await rig.stub.Forward(first())
    assert answer.result.step_id == 1


async def test_malformed_bytes_for_health_are_refused_as_such() -> None:
    async with serving() as rig:
        for method in ("Check", "Watch"):
            call = rig.channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\x0b")
            error = await failure(call)
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "grpc.health.v1.HealthCheckRequest" in (error.details() or "")
