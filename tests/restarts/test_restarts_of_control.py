"""The control plane is killed under clients that resume: a few times here, `make restarts` more."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.restarts.__main__ import SIMULATED
from tests.restarts.kills import planes, run

pytestmark = pytest.mark.slow


def test_nothing_is_lost_doubled_or_changed(tiny_model: Path, tmp_path: Path) -> None:
    with planes(tmp_path, str(tiny_model), SIMULATED) as killed:
        report = asyncio.run(run(killed, kills=4, clients=6, seed=20261201))
        killed.wait_until_serving()
        log = killed.worker.log.read_text()
    assert report.differences == []
    assert len(report.recoveries) == 4 and report.brought
    assert "Traceback" not in log
