"""So many lines in a second, and the number of the rest, whatever the pace."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.simulation.virtual_time import VirtualLoop, run_virtual
from twinplane.process.line_quota import LineQuota


@pytest.mark.parametrize("seed", range(60))
def test_every_line_is_written_or_counted(seed: int) -> None:
    async def main(loop: VirtualLoop) -> None:
        rng = random.Random(seed)
        most = rng.randrange(0, 12)
        told: list[int] = []
        written: list[float] = []
        quota = LineQuota(most, told.append)
        asked = rng.randrange(1, 200)
        for _ in range(asked):
            if quota.take():
                written.append(loop.time())
            await asyncio.sleep(rng.choice((0.0, 0.0, 0.0, 0.01, 0.3, 2.0)))
        await asyncio.sleep(2.0)
        assert len(written) + sum(told) == asked
        assert all(told)
        for at in written:  # in no second twice as many, wherever it begins
            assert sum(at <= other < at + 1.0 for other in written) <= 2 * most

    run_virtual(main)


def test_what_was_left_out_is_told_at_the_end_too() -> None:
    async def main(loop: VirtualLoop) -> None:
        told: list[int] = []
        quota = LineQuota(1, told.append)
        assert [quota.take() for _ in range(3)] == [True, False, False]
        quota.end_second()
        assert told == [2]
        quota.end_second()
        await asyncio.sleep(5.0)
        assert told == [2]

    run_virtual(main)
