"""deploy/twinplane.toml: a settings file that parses, names every setting and tells its default."""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.support.planes import ROOT
from twinplane.settings.control import ControlConfig
from twinplane.settings.example import example
from twinplane.settings.known import known_settings
from twinplane.settings.resolution import resolve
from twinplane.settings.worker import WorkerConfig

FILE = ROOT / "deploy" / "twinplane.toml"
CLASSES = [("control", ControlConfig), ("worker", WorkerConfig)]


def from_file(cls: type, table: str, file: Path) -> ControlConfig | WorkerConfig:
    settings: ControlConfig | WorkerConfig = resolve(
        cls, argparse.Namespace(), {}, file, table, known=known_settings()
    )
    return settings


def test_it_is_up_to_date() -> None:
    """After a change: python -m twinplane.settings.example > deploy/twinplane.toml"""
    assert FILE.read_text(encoding="utf-8") == example()


@pytest.mark.parametrize(("table", "cls"), CLASSES)
def test_as_it_is_it_changes_nothing(table: str, cls: type) -> None:
    assert from_file(cls, table, FILE) == cls()


@pytest.mark.parametrize(("table", "cls"), CLASSES)
def test_every_line_can_be_used(table: str, cls: type, tmp_path: Path) -> None:
    whole = re.sub(r"^#(\w+ = )", r"\1", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (tmp_path / "whole.toml").write_text(whole, encoding="utf-8")
    own = re.split(r"^\[\w+\]$", whole, flags=re.MULTILINE)[1 if table == "control" else 2]
    named = re.findall(r"^(\w+) = ", own, re.MULTILINE)
    assert named == [setting.name for setting in fields(cls)]
    settings, defaults = from_file(cls, table, tmp_path / "whole.toml"), cls()
    for setting in fields(cls):
        default = getattr(defaults, setting.name)
        value = getattr(settings, setting.name)
        assert value == default or (default is None and isinstance(value, str))


def test_no_setting_is_left_without_an_example() -> None:
    assert "…" not in example()
