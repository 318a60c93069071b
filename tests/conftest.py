"""Fixtures for every kind of test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import Phase, settings

from tests.support.planes import Planes, running_planes
from tests.support.quick import QUICK, UNSHRUNK
from tests.support.tiny_model import write_tiny_model

settings.register_profile(QUICK)
settings.register_profile(UNSHRUNK, phases=(Phase.explicit, Phase.generate))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder without weights: for the control plane and simulated workers."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def simulated_planes(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Planes]:
    """Both planes as processes, the worker simulated; shared by one module's tests."""
    folder = tmp_path_factory.mktemp("planes")
    with running_planes(
        folder, tiny_model, control_flags=("--served-model-name", "tiny")
    ) as planes:
        yield planes
