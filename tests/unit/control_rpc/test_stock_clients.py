"""gRPC's own retries, as any stock client has them, against the client edge.

Their service config is the one that docs/contract.md publishes. A test must not wait for its
backoff, so here it is a minute long: whoever is back before has obeyed the server.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from control_plane.core.errors import QueueFull
from control_plane.core.events import FinishReason
from control_plane.shell.engine import EngineDraining, EngineLost
from control_plane.text.errors import TextBusy
from tests.support.edge_rig import Edge, FakeEngine
from tests.support.planes import ROOT
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc

LONG_SECONDS = 60
REFUSALS = [
    QueueFull("full", 0.02),
    QueueFull("full", 0.3),
    TextBusy(0.1),
    EngineLost("gone"),
    EngineDraining("stops"),
]


def published() -> dict[str, Any]:
    text = (ROOT / "docs" / "contract.md").read_text()
    blocks = re.findall(r"^```json\n(.*?)^```$", text, re.S | re.M)
    (block,) = (block for block in blocks if "methodConfig" in block)
    config: dict[str, Any] = json.loads(block)
    return config


def slow() -> str:
    config = published()
    for method in config["methodConfig"]:
        method["retryPolicy"] |= {
            "initialBackoff": f"{LONG_SECONDS}s", "maxBackoff": f"{2 * LONG_SECONDS}s",
        }  # fmt: skip
    return json.dumps(config)


class RefusesOnce(FakeEngine):
    """Refuses the first request, with `first`; later ones end at once."""

    def __init__(self, first: Exception) -> None:
        super().__init__()
        self.refusal = first

    def submit(self, request: Any, stream: Any) -> None:
        refusal, self.refusal = self.refusal, None
        if refusal is not None:
            raise refusal
        super().submit(request, stream)
        self.push([104], self.end(FinishReason.LENGTH, 1))


async def _generate(stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> str:
    return "".join([each.delta.text async for each in stub.Generate(pb.GenerateRequest(text="x"))])


async def _complete(stub: inference_pb2_grpc.InferenceServiceAsyncStub) -> str:
    answer = await stub.Complete(pb.CompleteRequest(text="x"))
    return str(answer.text)


@pytest.mark.parametrize("call", [_generate, _complete])
@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: f"{type(error).__name__}")
async def test_they_come_back_when_they_are_asked_to(
    edge: Edge, refusal: Exception, call: Callable[[Any], Any]
) -> None:
    engine = RefusesOnce(refusal)
    edge.servicer._engine = engine
    options = [("grpc.service_config", slow()), ("grpc.enable_http_proxy", 0)]
    async with (
        asyncio.timeout(LONG_SECONDS * 0.7),  # the library shortens its backoff by a fifth at most
        grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}", options) as channel,
    ):
        assert await call(inference_pb2_grpc.InferenceServiceStub(channel))
    assert len(engine.requests) == 1
    await edge.wait_counted(2)
    assert [code for _, code in edge.calls][1:] == ["OK"]


async def test_what_waiting_does_not_mend_is_not_tried_again(edge: Edge) -> None:
    options = [("grpc.service_config", slow()), ("grpc.enable_http_proxy", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{edge.port}", options) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Complete(pb.CompleteRequest(text=""))
    await edge.wait_counted()
    assert edge.calls == [("Complete", "INVALID_ARGUMENT")]


def test_the_published_policy_is_for_every_rpc_of_the_service() -> None:
    (method,) = published()["methodConfig"]
    service = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
    assert method["name"] == [{"service": service}]
    codes = method["retryPolicy"]["retryableStatusCodes"]
    assert codes == ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]
