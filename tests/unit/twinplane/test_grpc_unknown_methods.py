"""A call of an RPC that a server lacks is told what the server has."""

from __future__ import annotations

import grpc
import pytest

from tests.support.edge_rig import refused
from tests.support.small_server import SERVICE, STREAM, small_server
from twinplane.grpc.interceptors import StatusInterceptor

NAMES = (
    "/twinplane.inference.v1.InferenceService/Generate",
    f"/{SERVICE}/Newer",
    "/twinplane.made.up/Method",
    "/some.other/Service",
    "/",
    "no-slash",
    "/" + "x" * 2_000,
)
KINDS = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")


async def _call(channel: grpc.aio.Channel, method: str, kind: str) -> object:
    async def requests() -> object:
        yield b"message"

    streams, answers = kind.split("_")
    call = getattr(channel, kind)(method)(
        requests() if streams == "stream" else b"message", timeout=60
    )
    if answers == "unary":
        return await call
    return [answer async for answer in call]


@pytest.mark.parametrize("method", NAMES, ids=lambda name: name[:50])
async def test_it_is_unimplemented_and_names_the_services(method: str) -> None:
    counted: list[str] = []
    interceptor = StatusInterceptor(
        lambda error: None, lambda end: counted.append(end.method), lambda: "error"
    )

    async def answer(request: object, context: object) -> object:
        yield b"answer"

    async with (
        small_server(answer, interceptor=interceptor) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        for kind in KINDS:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await _call(channel, method, kind)
            refusal = refused(caught.value)
            assert refusal.code is grpc.StatusCode.UNIMPLEMENTED
            assert refusal.info.reason == "METHOD_NOT_FOUND"
            assert refusal.info.metadata["services"] == SERVICE
            assert SERVICE in refusal.message
            assert len(refusal.message) < 300
        assert await _call(channel, STREAM, "unary_stream") == [b"answer"]
    assert set(counted) <= {STREAM}, "anybody could make up labels"
    assert set(interceptor._wrapped) <= {STREAM}, "anybody could fill the memory"
