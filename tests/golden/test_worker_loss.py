"""A real worker killed in the middle of streams: the clients' tokens go on unchanged."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from tests.golden.references import Reference, load_references
from tests.support.planes import Plane, running_planes
from twinplane import AsyncClient

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m-instruct"
TOKENS = 64
STREAMS = 6


async def test_streams_outlive_two_kills_of_their_worker(tmp_path: Path) -> None:
    references = load_references()[::10][:STREAMS]
    with running_planes(tmp_path, MODEL, worker_flags=("--dtype", "float32")) as planes:
        workers = [planes.worker]

        def replace_worker() -> None:
            """SIGKILL, and another process under the same address."""
            assert workers[-1].stop(signal.SIGKILL) == -signal.SIGKILL
            uds = planes.worker_address.removeprefix("unix:")
            workers.append(
                Plane(
                    ["worker", "--model", MODEL, "--dtype", "float32", "--uds", uds],
                    tmp_path / f"worker-{len(workers)}.log",
                )
            )

        progress = [0] * STREAMS
        moved = asyncio.Condition()
        async with AsyncClient(planes.address) as client:

            async def one(number: int, reference: Reference) -> tuple[int, ...]:
                tokens: list[int] = []
                generation = client.generate(
                    reference.prompt, max_tokens=TOKENS, temperature=0.0, ignore_eos=True
                )
                async for delta in generation:
                    tokens += delta.token_ids
                    async with moved:
                        progress[number] = len(tokens)
                        moved.notify_all()
                return tuple(tokens)

            async def disturb() -> None:
                for least in (8, 32):
                    async with moved:
                        await moved.wait_for(lambda least=least: min(progress) >= least)
                    assert min(progress) < TOKENS, "the streams were over before the kill"
                    await asyncio.to_thread(replace_worker)

            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(disturb())
                    streams = [group.create_task(one(n, r)) for n, r in enumerate(references)]
            finally:
                for worker in workers[1:]:
                    worker.stop()
        for reference, stream in zip(references, streams, strict=True):
            assert reference.disagreement(stream.result()) is None
