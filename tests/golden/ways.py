"""The ways in which the running service is compared with the references, and how it is asked."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.golden.references import Reference
from tests.support.planes import Planes, running_planes
from twinplane import AsyncClient

MODEL = "smollm2-135m-instruct"
TOKENS = 64
SAMPLED_TOKENS = 32

# 52 blocks of 16 tokens: hardly more than the longest prompt and its output need alone.
_BLOCK_BYTES = 16 * 2 * 30 * 3 * 64 * 4


@dataclass(frozen=True)
class Way:
    """How the requests are served. `every`: of the prompts only each so-manieth."""

    worker_flags: tuple[str, ...] = ()
    control_flags: tuple[str, ...] = ()
    streams: int = 32
    every: int = 1
    preempts: bool = False


ALONE = Way(streams=1)
CROWDED = {
    "whole": Way(),
    "chunks-of-16-synchronous": Way(
        control_flags=("--max-num-batched-tokens", "16", "--no-async-scheduling")
    ),
    "preempted": Way(
        worker_flags=("--kv-cache-memory-bytes", str(53 * _BLOCK_BYTES)), preempts=True
    ),
}


@contextmanager
def serving(way: Way, folder: Path) -> Iterator[Planes]:
    """Both planes as processes, with the default model; `folder` takes the logs."""
    flags = ("--dtype", "float32", *way.worker_flags)
    with running_planes(
        folder, MODEL, worker_flags=flags, control_flags=way.control_flags
    ) as planes:
        yield planes


def greedy_disagreements(
    planes: Planes, way: Way, references: Sequence[Reference]
) -> dict[int, str]:
    """What the service generates otherwise than the references, by their number."""
    chosen = references[:: way.every]
    answers = asyncio.run(
        _generate(planes, [r.prompt for r in chosen], way.streams, TOKENS, temperature=0.0)
    )
    differences = {
        number: reference.disagreement(tokens)
        for number, (reference, tokens) in enumerate(zip(chosen, answers, strict=True))
    }
    return {number: text for number, text in differences.items() if text is not None}


def draw(planes: Planes, way: Way, prompts: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Seeded samples: parameters and seed are fixed by a prompt's place."""
    return asyncio.run(_generate(planes, prompts, way.streams, SAMPLED_TOKENS, temperature=0.9))


def counter(planes: Planes, name: str, label: str = "") -> float:
    """A metric's value, summed over its labels or over those that hold `label`."""
    text = urllib.request.urlopen(planes.metrics_url, timeout=10).read().decode()
    values = re.findall(rf"^{name}(?:{{(.*)}})? (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in values if label in labels)


async def _generate(
    planes: Planes,
    prompts: Sequence[tuple[int, ...]],
    streams: int,
    tokens: int,
    temperature: float,
) -> list[tuple[int, ...]]:
    """The tokens generated for each prompt, `streams` at a time."""
    slots = asyncio.Semaphore(streams)
    async with AsyncClient(planes.address) as client:

        async def one(number: int, prompt: tuple[int, ...]) -> tuple[int, ...]:
            async with slots:
                generation = client.generate(
                    prompt,
                    max_tokens=tokens,
                    temperature=temperature,
                    top_k=50 if number % 2 else None,
                    top_p=0.95 if number % 3 else None,
                    min_p=0.01 if number % 5 == 0 else None,
                    seed=number,
                    ignore_eos=True,
                )
                return (await generation.result()).token_ids

        return await asyncio.gather(*(one(n, p) for n, p in enumerate(prompts)))
