"""A control plane that is frozen keeps its connections, and its clients notice it all the same."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from control_plane.rpc.server import CLIENT_CONNECTIONS
from tests.support.planes import running_planes
from tests.support.small_server import STREAM, small_server
from twinplane import Client, RetryPolicy, Unavailable
from twinplane.client import channel

pytestmark = pytest.mark.slow

TOKEN_COUNT = 300
NOTICED_SECONDS = 30.0
"""Ten, and what a busy machine adds. It was fifty."""
SILENT_SECONDS = 27.0
"""Five pings of a client, one of the server's, and more than twice what a frozen one is allowed."""


def test_clients_notice_a_frozen_control_plane_and_resume(tmp_path: Path, tiny_model: Path) -> None:
    flags = ("--simulate", "--simulate-step-ms=10")
    once = RetryPolicy(max_attempts=1, resume_patience=0.0)
    options: dict[str, Any] = {"seed": 3, "max_tokens": TOKEN_COUNT, "ignore_eos": True}
    with (
        running_planes(tmp_path, tiny_model, worker_flags=flags) as planes,
        Client(planes.address) as resuming,
        Client(planes.address, retry=once) as impatient,
    ):
        right = resuming.generate("ab", **options).result().token_ids
        assert len(right) == TOKEN_COUNT
        mine, other = resuming.generate("ab", **options), impatient.generate("ab", **options)
        reading, watching = iter(mine), iter(other)
        assert next(reading).token_ids and next(watching).token_ids
        process = planes.control.process
        process.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        try:
            with pytest.raises(Unavailable, match="fell silent"):
                list(watching)
            assert time.monotonic() - started < NOTICED_SECONDS
        finally:
            process.send_signal(signal.SIGCONT)
        list(reading)
        assert mine.result().token_ids == right


async def test_a_healthy_server_may_be_silent_for_long() -> None:
    """As during a long prefill, or a long wait. It has a control plane's own limits."""
    calls = 0

    async def behaviour(request: bytes, context: Any) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(SILENT_SECONDS)
        await context.write(b"first token")

    async with (
        small_server(behaviour, CLIENT_CONNECTIONS) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=channel.OPTIONS) as connection,
    ):
        method: Any = connection.unary_stream(STREAM)
        answers = [answer async for answer in method(b"prompt")]
    assert answers == [b"first token"] and calls == 1
