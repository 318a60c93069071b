"""README's table says what the code serves, and what it calls "not yet" is refused."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from docs.serves import (
    README,
    REFUSED_ARCHITECTURES,
    REFUSED_QUANTIZATION,
    table,
    with_table,
)
from tests.support.tiny_spec import TINY_CONFIG
from twinplane.settings.control import ControlConfig
from twinplane.settings.worker import WorkerConfig
from worker_service.load_errors import ModelUnsupported
from worker_service.model.families import FAMILIES
from worker_service.model.registry import describe


def test_the_table_is_not_stale() -> None:
    text = README.read_text(encoding="utf-8")
    assert with_table(text) == text, "run: make docs"
    assert table() in text.split("## Install")[0], "on the first screen"


def test_a_table_that_is_stale_is_written_anew() -> None:
    text = README.read_text(encoding="utf-8")
    first = FAMILIES[0].architecture
    assert with_table(text.replace(first, "OldForCausalLM")) == text


def test_every_family_is_named_and_described() -> None:
    for family in FAMILIES:
        assert f"`{family.architecture}`" in table()
        config = {**TINY_CONFIG, "architectures": [family.architecture]}
        assert describe(config).architecture == family.architecture


@pytest.mark.parametrize("kind", REFUSED_ARCHITECTURES)
def test_an_architecture_that_is_not_served_yet_is_refused_by_name(kind: str) -> None:
    name = REFUSED_ARCHITECTURES[kind]
    assert kind in table()
    with pytest.raises(ModelUnsupported, match=f"architecture '{name}' is not supported"):
        describe({**TINY_CONFIG, "architectures": [name]})


@pytest.mark.parametrize("method", REFUSED_QUANTIZATION)
def test_weights_that_are_quantized_already_are_refused(method: str) -> None:
    assert method in table()
    with pytest.raises(ModelUnsupported, match="weights that are not quantized"):
        describe({**TINY_CONFIG, "quantization_config": {"quant_method": method.lower()}})


def test_what_has_no_setting_is_not_there_yet() -> None:
    names = {field.name for cls in (ControlConfig, WorkerConfig) for field in fields(cls)}
    for word in ("tls", "ssl", "token_file", "api_key", "http_port"):
        assert not [name for name in names if word in name], "README says: not yet"


def test_the_page_says_when_to_use_something_else() -> None:
    page = (Path(README).parent / "docs" / "serves.md").read_text(encoding="utf-8")
    assert "## When to use something else" in page
