"""What many streams make and drop in each step is no reason for the collector to run."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from bench.fleet_cost import measure
from twinplane.process.garbage import settle_collector


@pytest.fixture
def _restored() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


@pytest.mark.usefixtures("_restored")
def test_a_thousand_streams_do_not_make_each_step_collect() -> None:
    runs = 0

    def count(phase: str, info: dict[str, int]) -> None:
        nonlocal runs
        runs += phase == "start"

    def collections() -> int:
        nonlocal runs
        gc.collect()
        runs = 0
        asyncio.run(measure(32, 8, 60))
        return runs

    gc.callbacks.append(count)
    try:
        by_default = collections()
        settle_collector()
        settled = collections()
    finally:
        gc.callbacks.remove(count)
    assert by_default > 20
    assert settled <= by_default / 10
