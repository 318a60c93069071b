"""Processes that are ranks, shared by the tests here: each takes seconds to import torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.rank_processes import Rank


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[list[Rank]]:
    """Four ranks; a test that kills one puts another in its place. All end by themselves."""
    pool = [Rank() for _ in range(4)]
    try:
        yield pool
        for rank in pool:
            rank.close()
        assert [rank.process.exitcode for rank in pool] == [0] * len(pool)
    finally:
        for rank in pool:
            rank.kill()
