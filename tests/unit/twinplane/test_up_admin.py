"""Under `up`, operators have a port when workers may read weights, and by default only then."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from twinplane.cli import planes, up
from twinplane.settings.control import USUAL_ADMIN_PORT, ControlConfig


@pytest.mark.parametrize(
    ("flags", "variables", "file", "port"),
    [
        ({}, {}, "", None),
        ({"admin_port": "1234"}, {}, "", 1234),
        ({"weights_root": "/w"}, {}, "", USUAL_ADMIN_PORT),
        ({}, {"TWINPLANE_WEIGHTS_ROOT": "/w"}, "", USUAL_ADMIN_PORT),
        ({}, {}, 'weights_root = "/w"', USUAL_ADMIN_PORT),
        ({"weights_root": "/w", "admin_port": "1234"}, {}, "", 1234),
        ({"weights_root": "/w"}, {"TWINPLANE_ADMIN_PORT": "1235"}, "", 1235),
        ({"weights_root": "/w"}, {}, "admin_port = 1236", 1236),
    ],
)
def test_the_port_of_operators(
    tmp_path: Path,
    flags: dict[str, str],
    variables: dict[str, str],
    file: str,
    port: int | None,
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(f"[worker]\n{file}" if "weights" in file else f"[control]\n{file}")
    namespace = argparse.Namespace(config=config, **flags)
    worker = planes.resolve_worker(planes.worker_flags(namespace), variables)
    control_flags = planes.control_flags(namespace)
    control = planes.resolve_control(control_flags, variables, worker)
    up.open_admin_port(control_flags, control, worker)
    final = planes.resolve_control(control_flags, variables, worker)
    assert final.admin_port == port


def test_it_is_never_beyond_loopback_by_default() -> None:
    assert ControlConfig().admin_host == "127.0.0.1"
