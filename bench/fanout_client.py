"""A client process of bench/stream_fanout.py: many streams, read as cheaply as gRPC allows.

usage: python -m bench.fanout_client ADDRESS OUTPUT FIRST COUNT PROMPT_TOKENS OUTPUT_TOKENS

Opens streams FIRST to FIRST + COUNT; the first token of a stream's prompt is its number. OUTPUT
gets an array [COUNT, OUTPUT_TOKENS] of CLOCK_MONOTONIC seconds at which each token had arrived and
was decoded, and an array [COUNT] of messages with tokens.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterable
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt

from twinplane.common.v1 import types_pb2
from twinplane.inference.v1 import inference_pb2, inference_pb2_grpc
from twinplane.process.event_loop import new_event_loop


def request(stream: int, prompt_tokens: int, output_tokens: int) -> inference_pb2.GenerateRequest:
    """A prompt that no other stream begins alike."""
    tokens = [stream, *((stream * 31 + place) % 40_000 for place in range(1, prompt_tokens))]
    return inference_pb2.GenerateRequest(
        token_ids=types_pb2.TokenIds(ids=tokens),
        sampling=types_pb2.SamplingParameters(temperature=0.0),
        stop=inference_pb2.StopConditions(max_tokens=output_tokens, ignore_end_of_sequence=True),
    )


async def read(
    call: AsyncIterable[inference_pb2.GenerateResponse], arrivals: npt.NDArray[np.float64]
) -> int:
    """Fills `arrivals` [OUTPUT_TOKENS]; returns how many messages brought them."""
    done = messages = 0
    async for message in call:
        count = len(message.delta.token_ids)
        if count:
            arrivals[done : done + count] = time.monotonic()
            done += count
            messages += 1
    assert done == arrivals.size, f"{done} tokens instead of {arrivals.size}"
    return messages


async def run(
    address: str, output: Path, first: int, count: int, prompt_tokens: int, output_tokens: int
) -> None:
    arrivals = np.full((count, output_tokens), np.nan)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        calls = [
            stub.Generate(request(first + place, prompt_tokens, output_tokens))
            for place in range(count)
        ]
        messages = await asyncio.gather(*map(read, calls, arrivals))
    with output.open("wb") as sink:
        np.save(sink, arrivals)
        np.save(sink, np.array(messages))


def main() -> None:
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
    address, output, *numbers = sys.argv[1:]
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(run(address, Path(output), *map(int, numbers)))


if __name__ == "__main__":
    main()
