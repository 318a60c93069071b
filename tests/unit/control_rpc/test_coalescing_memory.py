"""Clients that stop reading: they cost the control plane little, and nobody else anything."""

from __future__ import annotations

import asyncio
import json
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import psutil
import pytest
from tokenizers import Tokenizer

from tests.support.planes import Planes, running_planes
from tests.support.tiny_model import write_tiny_model
from twinplane import AsyncClient
from twinplane.common.v1.types_pb2 import SamplingParameters, TokenIds
from twinplane.inference.v1 import inference_pb2_grpc
from twinplane.inference.v1.inference_pb2 import GenerateRequest, GenerateResponse, StopConditions

pytestmark = pytest.mark.slow

CLIENTS = 64
LONGEST = 20_000
UNREAD_TOKENS = 300_000
BYTES_PER_TOKEN = 64
"""A list's entry, a number and the core's own copy take less, a message of its own takes more."""
BUFFER_BYTES = 12 << 20
"""gRPC's: a flow control window per stream and connection, and what the allocator keeps."""


@pytest.fixture(scope="module")
def wordy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokens of a hundred characters: a few hundred of them fill gRPC's buffers on both sides."""
    folder = write_tiny_model(tmp_path_factory.mktemp("models") / "wordy")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([f"{index:03}-" * 25 for index in range(1000)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = tokenizer.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def planes(wordy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planes]:
    worker_flags = (
        "--simulate", "--simulate-step-ms", "0", "--simulate-token-us", "0",
        "--simulate-kilotoken-us", "0", "--max-num-seqs", str(CLIENTS + 1),
        "--max-model-len", str(LONGEST), "--simulate-block-count", str(CLIENTS * LONGEST // 8),
    )  # fmt: skip
    with running_planes(
        tmp_path_factory.mktemp("planes"), wordy_model, worker_flags=worker_flags
    ) as planes:
        yield planes


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[inference_pb2_grpc.InferenceServiceAsyncStub]:
    """A connection that takes in little before somebody reads."""
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", 0),
    ]
    async with grpc.aio.insecure_channel(address, options) as channel:
        yield inference_pb2_grpc.InferenceServiceStub(channel)


def endless(number: int) -> GenerateRequest:
    return GenerateRequest(
        token_ids=TokenIds(ids=[number, 1, 2]),
        sampling=SamplingParameters(temperature=1.0, seed=number),
        stop=StopConditions(max_tokens=LONGEST - 3, ignore_end_of_sequence=True),
    )


def metric(planes: Planes, name: str, label: str = "") -> float:
    text = urllib.request.urlopen(planes.metrics_url, timeout=30).read().decode()
    values = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in values if label in labels)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while True:
            if await asyncio.to_thread(condition):
                return
            await asyncio.sleep(0.05)


async def answer(planes: Planes) -> tuple[int, ...]:
    async with AsyncClient(planes.address) as client:
        generation = client.generate([7, 8, 9], max_tokens=300, seed=3, ignore_eos=True)
        return (await generation.result()).token_ids


async def gathered(
    call: grpc.aio.UnaryStreamCall[GenerateRequest, GenerateResponse], least: float
) -> bool:
    """Whether, behind what was sent before this client stalled, so many tokens come at once."""
    for _ in range(LONGEST):
        response = await call.read()
        assert isinstance(response, GenerateResponse)
        if len(response.delta.token_ids) >= least:
            return True
    return False


async def test_they_cost_little_memory_and_nobody_else_anything(planes: Planes) -> None:
    control = psutil.Process(planes.control.process.pid)
    expected = await answer(planes)

    def generated() -> float:
        return metric(planes, "twinplane_tokens_total", "generated")

    async with connected(planes.address) as stub:
        calls = [stub.Generate(endless(number)) for number in range(CLIENTS)]
        try:
            for call in calls:
                await call.read()
            before, first = control.memory_info().rss, generated()
            await until(lambda: generated() - first >= UNREAD_TOKENS)
            grown, unread = control.memory_info().rss - before, generated() - first
            assert metric(planes, "twinplane_requests_running") == CLIENTS, "they shall not be over"
            assert grown <= BUFFER_BYTES + BYTES_PER_TOKEN * unread
            assert await answer(planes) == expected
            assert await gathered(calls[0], unread / CLIENTS / 4), "the server was not held up"
        finally:
            for call in calls:
                call.cancel()
        await until(lambda: metric(planes, "twinplane_requests_running") == 0)
    assert metric(planes, "twinplane_requests_waiting") == 0
    assert metric(planes, "twinplane_kv_tokens", "active") == 0
    assert await answer(planes) == expected
