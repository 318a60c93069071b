"""The names of both planes' settings: each plane tells the other's setting from a typing error."""

from __future__ import annotations

from collections.abc import Mapping

from twinplane.settings.control import ControlConfig
from twinplane.settings.resolution import setting_names
from twinplane.settings.worker import WorkerConfig


def known_settings() -> Mapping[str, frozenset[str]]:
    """Setting names by the plane's table in the settings file."""
    return {"control": setting_names(ControlConfig), "worker": setting_names(WorkerConfig)}
