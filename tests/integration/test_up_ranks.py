"""`twinplane up` with replicas of several ranks: any rank killed under load loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.references import load_references
from tests.support.up_ranks import Streams, running

pytestmark = pytest.mark.slow

PROMPTS = [f"Tell me {'more ' * n}about it" for n in range(8)]
TOKENS = 200
SIMULATED = ("--simulate", "--simulate-step-ms", "10")


SIZES = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")


def undisturbed(folder: Path) -> list[list[int]]:
    """What one worker answers."""
    with running(folder, 0, "--simulate", "--simulate-step-ms", "1") as planes:
        return Streams(planes.address, PROMPTS, TOKENS).result()


def test_each_rank_killed_in_turn_loses_nothing(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    with running(tmp_path, 4, *SIMULATED, *SIZES) as planes:
        streams = Streams(planes.address, PROMPTS, TOKENS)
        for number in range(4):
            streams.reach(10 + 40 * number)
            planes.kill(number)
        assert streams.result() == expected
        assert len(planes.attachments()) >= 5


def test_a_frozen_rank_is_waited_for(tmp_path: Path) -> None:
    """SIGSTOP for longer than a silence may last: a pause, and the same tokens."""
    expected = undisturbed(tmp_path)
    with running(tmp_path, 4, *SIMULATED, *SIZES) as planes:
        streams = Streams(planes.address, PROMPTS, TOKENS)
        streams.reach(20)
        planes.freeze(1, 6.0)
        assert streams.result() == expected
        assert len(planes.attachments()) >= 2


def test_replicas_of_ranks_go_on_one_by_one(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path)
    sizes = ("--tensor-parallel-size", "2", "--data-parallel-size", "2")
    with running(tmp_path, 4, *SIMULATED, *sizes) as planes:
        streams = Streams(planes.address, PROMPTS, TOKENS)
        for number in (0, 3):
            streams.reach(10 + 40 * number)
            planes.kill(number)
        assert streams.result() == expected


@pytest.mark.model
def test_a_real_model_over_ranks_outlives_each_of_them(tmp_path: Path) -> None:
    """Its greedy answers are those of one rank, but for near ties, whoever dies."""
    references = load_references()[::15][:4]
    with running(tmp_path, 4, "--dtype=float32", *SIZES) as planes:
        prompts = [reference.prompt for reference in references]
        token_count = len(references[0].tokens)
        streams = Streams(planes.address, prompts, token_count, seeded=False)
        for least, number in ((4, 0), (20, 3)):
            streams.reach(least)
            planes.kill(number)
        for reference, tokens in zip(references, streams.result(), strict=True):
            assert reference.disagreement(tokens) is None
        assert len(planes.attachments()) >= 3
