"""A few of the rollouts of which `make rollouts` makes a hundred."""

from __future__ import annotations

from pathlib import Path

import pytest

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
