"""docs/operations.md names every setting and every metric, and none that does not exist."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields

import pytest

from control_plane.observability.metrics import Telemetry
from control_plane.rpc.errors import CODES, REASONS
from control_plane.rpc.server import INFERENCE_METHODS
from tests.support.planes import ROOT
from twinplane.settings.control import ControlConfig
from twinplane.settings.known import known_settings
from twinplane.settings.resolution import from_command_line
from twinplane.settings.worker import WorkerConfig
from worker_service.lifecycle import LifecycleState
from worker_service.telemetry import WorkerTelemetry

TEXT = (ROOT / "docs" / "operations.md").read_text()


def section(title: str) -> str:
    """From a heading to the next one."""
    return re.split(r"^#+ ", TEXT.split(f" {title}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.mark.parametrize(
    ("title", "settings"), [("Control plane", ControlConfig), ("Worker", WorkerConfig)]
)
def test_settings_are_those_that_exist(title: str, settings: type) -> None:
    named = set(re.findall(r"`--([a-z-]+)`", section(title)))
    assert named == {field.name.replace("_", "-") for field in fields(settings)}


@pytest.mark.parametrize("settings", [ControlConfig, WorkerConfig])
def test_limits_are_maximum_and_minimum(settings: type) -> None:
    """In help texts and on the page: nobody has to guess what "most" or "least" counts."""
    texts = [field.metadata["help"] for field in fields(settings)]
    texts += [section("Control plane"), section("Worker")]
    assert not [text for text in texts if re.search(r"\b(most|least)\b", text)]


def test_sizes_may_be_written_as_the_page_says() -> None:
    (row,) = (line for line in TEXT.splitlines() if "`--kv-cache-memory-bytes`" in line)
    sizes = re.findall(r"`(\d[\d.]*[A-Za-z]+)`", row)
    assert len(sizes) == 3
    for size in sizes:
        assert resolve_worker(size).kv_cache_memory_bytes


def resolve_worker(size: str) -> WorkerConfig:
    return from_command_line(
        WorkerConfig,
        [f"--kv-cache-memory-bytes={size}"],
        {},
        prog="worker",
        description="",
        table="worker",
        known=known_settings(),
    )


def control_scrape() -> str:
    """The first one, before the first worker."""
    telemetry = Telemetry("1", methods=INFERENCE_METHODS, codes=CODES, reasons=REASONS)
    telemetry.replica(0, lambda: None)
    return telemetry.render().decode()


def worker_scrape() -> str:
    """The first one, before it has loaded."""
    return WorkerTelemetry("1", lambda: LifecycleState.LOADING).render().decode()


@pytest.mark.parametrize(
    ("title", "scrape"), [("The control plane's", control_scrape), ("A worker's", worker_scrape)]
)
def test_metrics_are_those_that_exist(title: str, scrape: Callable[[], str]) -> None:
    """Each has a sample in the first scrape."""
    rendered = scrape()
    types = dict(re.findall(r"^# TYPE (twinplane_\w+) (\w+)$", rendered, re.MULTILINE))
    text = section(title)
    named = dict(
        re.findall(r"^\| `(twinplane_\w+)(?:\{[\w,]+\})?` \| (\w+) \|", text, re.MULTILINE)
    )
    assert named == types
    sampled = set(re.findall(r"^(twinplane_\w+?)(?:_bucket)?(?:\{.*\})? [\d.]+$", rendered, re.M))
    assert named.keys() <= sampled


def test_the_queries_ask_for_series_that_exist() -> None:
    rendered = control_scrape()
    queries = re.findall(r"^\| [^|`]+ \| `(.*twinplane_.*)` \|$", TEXT, re.MULTILINE)
    assert len(queries) >= 7
    for query in queries:
        selectors = re.findall(r"(twinplane_\w+)(?:\{(\w+)=(~?)\"([^\"]+)\"\})?", query)
        assert selectors
        for name, label, is_pattern, value in selectors:
            labels = re.findall(rf"^{name}(?:\{{(.*)\}})? ", rendered, re.MULTILINE)
            assert labels, name
            pattern = value if is_pattern else re.escape(value)
            assert not label or any(re.search(f'{label}="{pattern}"', one) for one in labels)
