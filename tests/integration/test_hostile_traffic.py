"""Hostile and heavy traffic against running planes: bounded, refused by name, nobody disturbed."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import psutil
import pytest

from tests.support.malformed import broken, field
from tests.support.planes import Planes, running_planes
from tests.support.raw_http2 import raw_connection
from twinplane import AsyncClient, Client
from twinplane.grpc.status import read
from twinplane.inference.v1 import inference_pb2 as pb
from twinplane.inference.v1 import inference_pb2_grpc

pytestmark = pytest.mark.slow

GENERATE = "/twinplane.inference.v1.InferenceService/Generate"
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
PATIENCE = 120.0
MEGABYTE = 1 << 20
ROWS, WAITING = 64, 64


@pytest.fixture(scope="module")
def planes(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planes]:
    with running_planes(
        tmp_path_factory.mktemp("planes"),
        tiny_model,
        worker_flags=("--simulate", "--max-num-seqs", str(ROWS)),
        control_flags=("--max-num-waiting", str(WAITING)),
    ) as planes:
        yield planes


def gauges(planes: Planes) -> dict[str, float]:
    """What must be as it was once everybody has gone."""
    text = urllib.request.urlopen(planes.metrics_url, timeout=30).read().decode()
    names = ("twinplane_requests_running", "twinplane_requests_waiting", "twinplane_kv_tokens")
    found = {}
    for line in text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(names) and "cached" not in name and "free" not in name:
            found[name] = float(value)
    return found


def rpcs(planes: Planes, method: str, code: str) -> float:
    """Calls of a method that have ended with a code."""
    text = urllib.request.urlopen(planes.metrics_url, timeout=30).read().decode()
    labels = (f'method="/twinplane.inference.v1.InferenceService/{method}"', f'code="{code}"')
    for line in text.splitlines():
        if line.startswith("twinplane_rpcs_total") and all(label in line for label in labels):
            return float(line.rpartition(" ")[2])
    return 0.0


def settled(planes: Planes, before: dict[str, float]) -> None:
    """Waits until the gauges are what they were."""
    deadline = time.monotonic() + PATIENCE
    while gauges(planes) != before:
        assert time.monotonic() < deadline, (gauges(planes), before)
        time.sleep(0.05)


@contextmanager
def watched(planes: Planes) -> Iterator[list[int]]:
    """How many bytes the control plane's memory grew at most; complete at the end of the block."""
    process = psutil.Process(planes.control.process.pid)
    start = process.memory_info().rss
    grown, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            grown[0] = max(grown[0], process.memory_info().rss - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        done.set()
        watcher.join()


async def outcomes(planes: Planes, requests: list[pb.GenerateRequest]) -> list[str]:
    """How each of the requests ends, all sent at once."""
    async with grpc.aio.insecure_channel(planes.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def one(request: pb.GenerateRequest) -> str:
            call = stub.Generate(request, timeout=PATIENCE)
            with suppress(grpc.aio.AioRpcError):  # its code says it as well
                async for _ in call:
                    pass
            return (await call.code()).name

        return await asyncio.gather(*map(one, requests))


def test_as_many_as_rows_and_queue_hold_come_at_once_and_nobody_is_refused(planes: Planes) -> None:
    before = gauges(planes)
    stop = pb.StopConditions(max_tokens=40, ignore_end_of_sequence=True)
    requests = [
        pb.GenerateRequest(text=f"{number} " * 200, stop=stop) for number in range(ROWS + WAITING)
    ]
    for _ in range(3):
        assert set(asyncio.run(outcomes(planes, requests))) == {"OK"}
    settled(planes, before)


def test_two_hundred_large_requests_are_not_held_at_once(planes: Planes) -> None:
    """800 MB of messages; they used to be held whole, each several times over."""
    before = gauges(planes)
    large = pb.GenerateRequest(text="x" * 4_000_000)
    with watched(planes) as grown:
        codes = asyncio.run(outcomes(planes, [large] * 200))
    assert set(codes) == {"INVALID_ARGUMENT"}
    assert grown[0] < 300 * MEGABYTE
    settled(planes, before)


def test_a_compressed_request_is_not_unpacked_beyond_a_messages_limit(planes: Planes) -> None:
    packed = gzip.compress(pb.GenerateRequest(text="x" * (1 << 28)).SerializeToString(), 1)
    assert len(packed) < 4 * MEGABYTE, "or it were too large as it is"
    count = rpcs(planes, "Generate", "RESOURCE_EXHAUSTED")
    with watched(planes) as grown, grpc.insecure_channel(planes.address) as channel:
        # As a client that compresses by itself sends it: flagged, and with its encoding.
        send = channel.unary_stream(GENERATE, request_serializer=lambda text: text)
        for _ in range(5):
            with pytest.raises(grpc.RpcError) as error:
                list(send(packed, timeout=PATIENCE))
            assert read(error.value).code is EXHAUSTED
            assert read(error.value).reason == "MESSAGE_TOO_LARGE"
        plain = pb.GenerateRequest(text="x" * 8 * MEGABYTE).SerializeToString()
        with pytest.raises(grpc.RpcError) as error:
            list(send(plain, compression=grpc.Compression.Gzip, timeout=PATIENCE))
        assert read(error.value).code is EXHAUSTED
    assert grown[0] < 100 * MEGABYTE
    assert rpcs(planes, "Generate", "RESOURCE_EXHAUSTED") == count + 6


def malformed_told(planes: Planes) -> int:
    """Malformed messages that the log tells of: a line each, or in the number of those left out."""
    lines = map(json.loads, planes.control.log.read_text().splitlines())
    told = [line for line in lines if line["message"] == "a message was malformed"]
    return sum(line.get("count", 1) for line in told)


def test_a_stream_beside_all_this_gets_the_same_tokens(planes: Planes) -> None:
    before = gauges(planes)
    port = int(planes.address.rpartition(":")[2])
    whole = pb.GenerateRequest(text="text", stop=pb.StopConditions(strings=["text"]))
    malformed = list(broken(whole.SerializeToString(), pb.GenerateRequest, 100, seed=5))
    unknown = field(pb.GenerateRequest, "text", b"a") + b"\xa0\x3f\x01" * 1_000_000

    async def abuse() -> None:
        async with (
            grpc.aio.insecure_channel(planes.address) as channel,
            raw_connection(port) as raw,
        ):
            for _ in range(1_000):
                await raw.open_call(GENERATE)  # and no message
            send = channel.unary_stream(GENERATE)
            for content in (*malformed, *[unknown] * 10):
                code = await send(content, timeout=PATIENCE).code()
                assert code is grpc.StatusCode.INVALID_ARGUMENT

    async def main() -> tuple[tuple[int, ...], tuple[int, ...]]:
        options = {"max_tokens": 600, "seed": 7, "ignore_eos": True}
        async with AsyncClient(planes.address) as client:
            alone = await client.generate("beside", **options).result()  # type: ignore[arg-type]
            beside = client.generate("beside", **options)  # type: ignore[arg-type]
            await abuse()
            return alone.token_ids, (await beside.result()).token_ids

    count = rpcs(planes, "Generate", "INVALID_ARGUMENT")
    alone, beside = asyncio.run(main())
    assert alone == beside
    assert rpcs(planes, "Generate", "INVALID_ARGUMENT") >= count + len(malformed) + 10
    told_deadline = time.monotonic() + PATIENCE  # the number of those left out comes a second later
    while malformed_told(planes) < len(malformed):
        assert time.monotonic() < told_deadline, "malformed messages left no trace in the log"
        time.sleep(0.05)
    assert "Traceback" not in planes.control.log.read_text()
    settled(planes, before)
    with Client(planes.address) as client:
        assert client.generate("still", max_tokens=3, ignore_eos=True).result().token_ids
