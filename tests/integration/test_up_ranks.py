"""`twinplane up` with replicas of several ranks: any rank killed under load loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.up_ranks import Streams, running

pytestmark = pytest.mark.slow

PROMPTS = [f"Tell me {'more ' * n}about it" for n in range(8)]
TOKENS = 200
SIMULATED = ("--simulate", "--simulate-step-ms", "10")


def undisturbed(folder: Path) -> list[list[int]]:
    """What one worker answers."""
    with running(folder, 0, "--simulate", "--simulate-step-ms", "1") as planes:
        return Streams(planes.address, PROMPTS, TOKENS).result()


def test_each_rank_killed_in_turn_loses_nothing(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    sizes = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    with running(tmp_path, 4, *SIMULATED, *sizes) as planes:
        streams = Streams(planes.address, PROMPTS, TOKENS)
        for number in range(4):
            streams.reach(10 + 40 * number)
            planes.kill(number)
        assert streams.result() == expected
        assert len(planes.attachments()) >= 5


@pytest.mark.model
def test_ranks_of_the_default_model_lose_nothing(tmp_path: Path) -> None:
    """Four real ranks. The one that answers is killed while it does."""
    sizes = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
    with running(tmp_path, 4, *sizes, "--max-model-len", "256") as planes:
        expected = Streams(planes.address, PROMPTS[:4], 24).result()
        streams = Streams(planes.address, PROMPTS[:4], 24)
        streams.reach(8)
        planes.kill(2)
        assert streams.result() == expected
        assert len(planes.attachments()) >= 2
