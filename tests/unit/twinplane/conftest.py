"""A scripted service, and both clients as one fixture."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.client_callers import Call, asynchronous, blocking
from tests.support.scripted_inference import ScriptedInference, serve


@pytest.fixture
def service() -> ScriptedInference:
    return ScriptedInference()


@pytest.fixture
def sleeps() -> list[float]:
    return []


@pytest.fixture(params=[blocking, asynchronous], ids=["sync", "async"])
def call(
    request: pytest.FixtureRequest, service: ScriptedInference, sleeps: list[float]
) -> Iterator[Call]:
    with serve(service) as address:
        yield lambda *args, **kwargs: request.param(address, *args, sleeps=sleeps, **kwargs)
