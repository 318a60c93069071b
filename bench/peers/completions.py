"""A small client of OpenAI's completions endpoint: HTTP/1.1 over asyncio, nothing to install.

One connection per request; prompts are token ids, the answer is streamed and greedy. It costs less
per token than our own client over gRPC does, so what the comparison owes to clients is the peers'.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from bench.load import Load, rates


class PeerFailed(Exception):
    """The peer answered with something else than the tokens asked for."""


def load(
    port: int, model: str, prompts: Sequence[list[int]], streams: int, output_tokens: int
) -> Load:
    """Generates greedily from each prompt, `streams` at a time. Raises PeerFailed."""
    return asyncio.run(_load(port, model, prompts, streams, output_tokens))


async def _load(
    port: int, model: str, prompts: Sequence[list[int]], streams: int, output_tokens: int
) -> Load:
    slots = asyncio.Semaphore(streams)

    async def one(prompt: list[int]) -> list[float]:
        async with slots:
            return await complete(port, model, prompt, output_tokens)

    started = time.perf_counter()
    stamps = await asyncio.gather(*map(one, prompts))
    wall = time.perf_counter() - started
    return rates(prompts, output_tokens, wall, stamps)


async def complete(port: int, model: str, prompt: list[int], output_tokens: int) -> list[float]:
    """Seconds from the request to each message of the answer. Raises PeerFailed."""
    started = time.perf_counter()
    stamps: list[float] = []
    counted = 0
    async for event in _events(port, _request(model, prompt, output_tokens)):
        if event.get("choices"):
            stamps.append(time.perf_counter() - started)
        usage = event.get("usage")
        if usage:
            counted = usage["completion_tokens"]
    if counted != output_tokens or not stamps:
        raise PeerFailed(f"{counted} tokens instead of {output_tokens}")
    return stamps


def _request(model: str, prompt: list[int], output_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _events(port: int, request: bytes) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of the answer, without the last, [DONE]."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(request)
        status = await reader.readline()
        headers = await reader.readuntil(b"\r\n\r\n")
        if b" 200 " not in status or b"chunked" not in headers.lower():
            raise PeerFailed(f"{status!r} {(await reader.read(2000))!r}")
        pending = b""
        while size := int(await reader.readline(), 16):
            pending += (await reader.readexactly(size + 2))[:-2]
            *lines, pending = pending.split(b"\n")
            for line in lines:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    yield json.loads(line[5:])
    finally:
        writer.close()
