"""The client edge with a tiny model's text and a fake engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from control_plane.text.model_files import TextModel, load_text_model
from control_plane.text.processor import TextLimits
from tests.support.edge_rig import Edge, running_edge


@pytest.fixture(scope="session")
def tiny_text(tiny_model: Path) -> TextModel:
    return load_text_model(tiny_model)


@pytest.fixture
async def edge(tiny_text: TextModel) -> AsyncIterator[Edge]:
    async with running_edge(tiny_text, TextLimits()) as edge:
        yield edge
