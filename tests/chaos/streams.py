"""Clients of mixed kinds, again and again, and what they must get."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import grpc

from tests.chaos.stack import Stack
from twinplane.inference.v1 import inference_pb2 as pb

KINDS = ("greedy", "seeded", "stop string", "chat", "long prompt")


@dataclass(frozen=True)
class Answer:
    """All that a client may notice of its generation, but for the time."""

    text: str
    token_ids: tuple[int, ...]
    reason: int
    prompt_tokens: int
    completion_tokens: int


@dataclass(slots=True)
class Watch:
    """When each message of a stream came."""

    name: str
    times: list[float] = field(default_factory=list)

    def pause_after(self, moment: float, within: float) -> float | None:
        """The longest pause that ends after a moment; None: the stream was not in its midst."""
        if len(self.times) < 2 or not self.times[0] < moment < self.times[-1]:
            return None
        gaps = [
            later - earlier
            for earlier, later in zip(self.times, self.times[1:], strict=False)
            if later > moment and earlier < moment + within
        ]
        return max(gaps)


def asked(kind: str, number: int, token_count: int) -> pb.GenerateRequest:
    """A request of a kind; equal for equal arguments."""
    rng = random.Random(f"{kind} {number}")
    request = pb.GenerateRequest()
    request.stop.max_tokens = token_count - rng.randrange(token_count // 3)
    request.stop.ignore_end_of_sequence = True
    words = [rng.choice(("plane", "worker", "token", "block", "row")) for _ in range(8)]
    match kind:
        case "chat":
            request.chat.messages.add(role="user", content=" ".join(words))
        case "long prompt":
            request.text = " ".join(words * 12)
        case _:
            request.text = " ".join(words[: 1 + number % 4])
    request.sampling.temperature = 0.0
    if kind != "greedy":
        request.sampling.temperature = 1.0
        request.sampling.seed = 1 + number
    return request


async def answer(stack: Stack, request: pb.GenerateRequest, watch: Watch | None = None) -> Answer:
    """What a client gets. Raises what its call raises."""
    texts: list[str] = []
    tokens: list[int] = []
    async for response in stack.stub.Generate(request, timeout=300):
        if watch is not None:
            watch.times.append(time.monotonic())
        match response.WhichOneof("event"):
            case "delta":
                texts.append(response.delta.text)
                tokens += response.delta.token_ids
            case "finished":
                end = response.finished
                usage = end.usage
                return Answer(
                    "".join(texts),
                    tuple(tokens),
                    end.reason,
                    usage.prompt_token_count,
                    usage.completion_token_count,
                )
            case _:
                pass
    raise AssertionError("a stream without an end")


@dataclass(slots=True)
class Case:
    """A request and its right answer."""

    request: pb.GenerateRequest
    right: Answer


async def cases(stack: Stack, count: int, token_count: int) -> list[Case]:
    """So many requests of all kinds, and what an undisturbed run answers."""
    requests = [asked(KINDS[n % len(KINDS)], n, token_count) for n in range(count)]
    answers = await asyncio.gather(*(answer(stack, request) for request in requests))
    made = []
    for number, (request, right) in enumerate(zip(requests, answers, strict=True)):
        if KINDS[number % len(KINDS)] == "stop string" and len(right.text) > 12:
            # One that occurs in its second half, so that it goes through a loss.
            start = len(right.text) * 3 // 4
            request.stop.strings.append(right.text[start : start + 3])
            right = await answer(stack, request)
        made.append(Case(request, right))
    return made


class Load:
    """Streams that begin again as soon as they end, until `stop`. Counts what was wrong."""

    def __init__(self, stack: Stack, made: Sequence[Case]) -> None:
        self.done_count = 0
        self.errors: list[str] = []
        self.changed: list[str] = []
        self.watches: list[Watch] = []
        self._stack = stack
        self._names = count(1)
        self._stopped = False
        self._tasks = [asyncio.create_task(self._stream(case)) for case in made]

    async def stop(self) -> None:
        """Lets each stream end."""
        self._stopped = True
        await asyncio.gather(*self._tasks)

    async def _stream(self, case: Case) -> None:
        while not self._stopped:
            request = pb.GenerateRequest()
            request.CopyFrom(case.request)
            request.request_id = f"chaos-{next(self._names)}"
            watch = Watch(request.request_id)
            self.watches.append(watch)
            try:
                got = await answer(self._stack, request, watch)
            except grpc.RpcError as error:
                self.errors.append(f"{error.code().name}: {error.details()}")
                await asyncio.sleep(0.1)
                continue
            self.done_count += 1
            if got != case.right:
                self.changed.append(f"{request.request_id}: {got} instead of {case.right}")
