"""The client that loads the peers counts what was served, and says when it was not served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from bench.peers.completions import PeerFailed, complete

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\ncontent-type: text/event-stream\r\n\r\n"


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


TOKEN = event(choices=[{"text": "a"}])


def end(count: int) -> bytes:
    return event(choices=[], usage={"completion_tokens": count}) + b"data: [DONE]\n\n"


@asynccontextmanager
async def peer(head: bytes, chunks: Sequence[bytes], asked: list[bytes]) -> AsyncIterator[int]:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        headers = await reader.readuntil(b"\r\n\r\n")
        length = int(headers.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        asked.append(await reader.readexactly(length))
        writer.write(head)
        for chunk in (*chunks, b""):
            writer.write(f"{len(chunk):x}\r\n".encode() + chunk + b"\r\n")
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def test_counts_messages_however_they_are_cut_into_chunks() -> None:
    body = TOKEN + TOKEN + TOKEN + end(3)
    asked: list[bytes] = []
    async with peer(HEAD, [body[:7], body[7:60], body[60:]], asked) as port:
        stamps = await complete(port, "peer", [5, 6], 3)
    assert len(stamps) == 3
    assert stamps == sorted(stamps)
    request = json.loads(asked[0])
    assert request["prompt"] == [5, 6]
    assert request["max_tokens"] == 3
    assert request["ignore_eos"] is True


async def test_fewer_tokens_than_asked_for_are_no_measurement() -> None:
    async with peer(HEAD, [TOKEN, end(1)], []) as port:
        with pytest.raises(PeerFailed, match="1 tokens instead of 2"):
            await complete(port, "peer", [5], 2)


async def test_a_refusal_is_no_measurement() -> None:
    head = HEAD.replace(b"200 OK", b"400 Bad Request")
    async with peer(head, [b"no such model"], []) as port:
        with pytest.raises(PeerFailed, match="400"):
            await complete(port, "peer", [5], 2)
