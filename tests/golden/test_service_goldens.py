"""The running service against `transformers`, in every way the same request can be served.

Each crowded way serves all 64 prompts greedily through real processes and gRPC, and draws seeded
samples that must equal those of one request at a time. `make exactness` serves all prompts one at
a time, too; what happens around a request is varied further in tests/exactness.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden.make_references import continuation, load_model
from tests.golden.prompts import CHATS, PLAIN
from tests.golden.references import Reference, load_references
from tests.golden.ways import (
    ALONE,
    CROWDED,
    MODEL,
    counter,
    draw,
    greedy_disagreements,
    serving,
)
from tests.support.planes import running_planes
from twinplane import Client, Message
from twinplane.models import resolve

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]

SAMPLED_PROMPTS = 12
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def references() -> list[Reference]:
    return load_references()


@pytest.fixture(scope="module")
def sampled(
    references: list[Reference], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[int, ...], tuple[int, ...]]:
    """What one request at a time draws for some prompts; a few greedy ones are right as well."""
    prompts = [r.prompt for r in references[:: len(references) // SAMPLED_PROMPTS]]
    with serving(ALONE, tmp_path_factory.mktemp("alone")) as planes:
        assert not greedy_disagreements(planes, replace(ALONE, every=16), references)
        return dict(zip(prompts, draw(planes, ALONE, prompts), strict=True))


@pytest.mark.parametrize("name", CROWDED)
def test_every_way_agrees_with_transformers_and_draws_alike(
    name: str,
    references: list[Reference],
    sampled: dict[tuple[int, ...], tuple[int, ...]],
    tmp_path: Path,
) -> None:
    way = CROWDED[name]
    with serving(way, tmp_path) as planes:
        assert not greedy_disagreements(planes, way, references), "cold"
        for _ in ("cold", "cached"):
            assert draw(planes, way, list(sampled)) == list(sampled.values())
        if way.preempts:
            short = [r for r in references if len(r.prompt) <= 2 * BLOCK_SIZE]
            assert not greedy_disagreements(planes, way, short), "resumed from the cache"
            assert counter(planes, "twinplane_preemptions_total") >= way.streams


def test_what_the_prefix_cache_holds_agrees_with_transformers(
    references: list[Reference], tmp_path: Path
) -> None:
    """Only prompts of which at least a block is cached."""
    long = [r for r in references if len(r.prompt) > BLOCK_SIZE]
    way = CROWDED["whole"]
    with serving(way, tmp_path) as planes:
        draw(planes, way, [r.prompt for r in long])
        before = counter(planes, "twinplane_tokens_total", "prompt_cached")
        assert not greedy_disagreements(planes, way, long)
        cached = counter(planes, "twinplane_tokens_total", "prompt_cached") - before
        assert cached >= len(long) * BLOCK_SIZE


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
    for reference in references[::24]:
        tokens, _ = continuation(model, list(reference.prompt))
        assert reference.disagreement(tokens) is None
