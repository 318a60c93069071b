"""A few of the disturbances of which `make chaos` makes hundreds."""

from __future__ import annotations

import pytest

from tests.chaos.__main__ import TRIALS, parser, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("trial", ["kill", "restart", "cancel"])
async def test_clients_notice_nothing_but_a_pause(trial: str) -> None:
    times = {"kill": 3, "restart": 2, "cancel": 80}[trial]
    flags = [trial, f"--times={times}", "--streams=16", "--tokens=100"]
    (report,) = await run(parser().parse_args(flags))
    assert report.times == times
    assert not report.errors and not report.changed, report.line()
    assert not report.orphan_count and not any(report.exit_codes)
    if trial != "cancel":
        assert report.answers >= 16
        assert len(report.exit_codes) == (times if trial == "restart" else 0)


def test_each_trial_has_a_name() -> None:
    assert set(parser().parse_args(list(TRIALS)).trials) == set(TRIALS)
