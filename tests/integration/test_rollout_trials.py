"""A few of the rollouts of which `make rollouts` makes a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.rollouts.real import real_trial
from tests.rollouts.trials import WAYS, simulated_trial

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("trial", "times"), [("update", len(WAYS)), ("kill", 3)])
async def test_each_token_is_of_the_weights_that_its_answer_names(
    trial: str, times: int, tmp_path: Path
) -> None:
    report = await simulated_trial(trial, tmp_path, times=times, streams=16, tokens=60, seed=20)
    assert report.wrong == [], report.line()
    assert sum(report.ends.values()) == times + 1
    assert report.answers >= 16
    if trial == "update":
        assert report.ends == {"done": times + 1}
        assert report.mixed and report.kept


async def test_answers_are_those_of_a_server_that_was_started_with_the_weights(
    tmp_path: Path,
) -> None:
    report = await real_trial(None, tmp_path, times=3, streams=8, tokens=40, seed=20)
    assert report.wrong == [], report.line()
    assert report.ends == {"done": 3} and report.answers >= 16
