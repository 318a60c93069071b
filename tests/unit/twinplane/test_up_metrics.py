"""Under `up`, one metrics setting is one endpoint: the control plane's."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from twinplane.cli import planes


@pytest.mark.parametrize(
    ("flags", "variables", "file", "port"),
    [
        ({}, {}, "", 9400),
        ({"metrics_port": "9500"}, {}, "", 9500),
        ({"metrics_port": "none"}, {}, "", None),
        ({}, {"TWINPLANE_METRICS_PORT": "9501"}, "", 9501),
        ({}, {}, "metrics_port = 9502", 9502),
        ({}, {}, "[control]\nmetrics_port = 9503", 9503),
        ({}, {}, "[worker]\nmetrics_port = 9504", 9400),
        ({"metrics_port": "9500"}, {"TWINPLANE_METRICS_PORT": "1"}, "metrics_port = 2", 9500),
    ],
)
def test_the_worker_beside_a_control_plane_takes_no_metrics_port(
    tmp_path: Path,
    flags: dict[str, str],
    variables: dict[str, str],
    file: str,
    port: int | None,
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(file)
    namespace = argparse.Namespace(config=config, **flags)
    worker = planes.resolve_worker(planes.worker_flags(namespace), variables)
    control = planes.resolve_control(planes.control_flags(namespace), variables, worker)
    assert (control.metrics_port, worker.metrics_port) == (port, None)
