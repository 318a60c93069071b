"""The running service against `transformers`, in every way the same request can be served.

Each way serves all 64 prompts greedily through real processes and gRPC; the seeded samples of
every way must equal those of the first. `make exactness` adds one stream over all prompts.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.golden.make_references import continuation, load_model
from tests.golden.prompts import CHATS, PLAIN
from tests.golden.references import Reference, load_references
from tests.support.planes import Planes, running_planes
from twinplane import AsyncClient, Client, Message
from twinplane.models import resolve

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "smollm2-135m-instruct"
TOKENS = 64
SAMPLED_PROMPTS = 12
SAMPLED_TOKENS = 32


@dataclass(frozen=True)
class Way:
    """How the requests are served."""

    worker_flags: tuple[str, ...] = ()
    control_flags: tuple[str, ...] = ()
    streams: int = 32
    every: int = 1
    preempts: bool = False


# 52 blocks of 16 tokens: hardly more than the longest prompt and its output need alone.
BLOCK_BYTES = 16 * 2 * 30 * 3 * 64 * 4
WAYS = {
    "whole": Way(),
    "synchronous": Way(control_flags=("--no-async-scheduling",)),
    "chunks-of-16": Way(control_flags=("--max-num-batched-tokens", "16")),
    "preempted": Way(
        worker_flags=("--kv-cache-memory-bytes", str(53 * BLOCK_BYTES)), preempts=True
    ),
    "alone": Way(streams=1, every=6),
}


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    return load_references()


@contextmanager
def serving(way: Way, folder: Path) -> Iterator[Planes]:
    flags = ("--dtype", "float32", *way.worker_flags)
    with running_planes(
        folder, MODEL, worker_flags=flags, control_flags=way.control_flags
    ) as planes:
        yield planes


async def generate(
    planes: Planes, prompts: list[tuple[int, ...]], streams: int, tokens: int, temperature: float
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


def counter(planes: Planes, name: str) -> float:
    text = urllib.request.urlopen(planes.metrics_url, timeout=10).read().decode()
    return sum(float(v) for v in re.findall(rf"^{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def chosen(references: list[Reference]) -> list[tuple[int, ...]]:
    """The prompts that are sampled with a seed."""
    return [r.prompt for r in references[:: len(references) // SAMPLED_PROMPTS]]


@pytest.fixture(scope="module")
def sampled(
    chosen: list[tuple[int, ...]], tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[int, ...]]:
    """Seeded samples of the plainest way: one request at a time."""
    with serving(WAYS["alone"], tmp_path_factory.mktemp("sampled")) as planes:
        return asyncio.run(generate(planes, chosen, 1, SAMPLED_TOKENS, 0.9))


@pytest.mark.parametrize("name", WAYS)
def test_every_way_agrees_with_transformers_and_draws_alike(
    name: str,
    references: list[Reference],
    chosen: list[tuple[int, ...]],
    sampled: list[tuple[int, ...]],
    tmp_path: Path,
) -> None:
    way = WAYS[name]
    expected = references[:: way.every]
    prompts = [r.prompt for r in expected]
    with serving(way, tmp_path) as planes:
        for run in ("cold", "cached")[: 2 if way.streams > 1 else 1]:
            tokens = asyncio.run(generate(planes, prompts, way.streams, TOKENS, 0.0))
            wrong = {
                number: difference
                for number, (reference, ours) in enumerate(zip(expected, tokens, strict=True))
                if (difference := reference.disagreement(ours)) is not None
            }
            assert not wrong, f"{name}, {run}: {wrong}"
        for run in ("cold", "cached"):
            drawn = asyncio.run(generate(planes, chosen, way.streams, SAMPLED_TOKENS, 0.9))
            assert drawn == sampled, f"{name}, {run}"
        if way.preempts:
            assert counter(planes, "twinplane_preemptions_total") >= way.streams


def test_the_service_tokenizes_as_transformers_does(
    references: list[Reference], tmp_path: Path
) -> None:
    inputs = [*PLAIN, *([Message(r, c) for r, c in chat] for chat in CHATS)]
    with running_planes(tmp_path, MODEL) as planes, Client(planes.address) as client:
        for given, reference in zip(inputs, references, strict=True):
            assert client.tokenize(given) == reference.prompt


def test_live_transformers_still_generates_the_references(references: list[Reference]) -> None:
    """The stored data are what the installed `transformers` says now, on a few prompts."""
    model = load_model(resolve(MODEL))
    for reference in references[::16]:
        tokens, _ = continuation(model, list(reference.prompt))
        assert reference.disagreement(tokens) is None
