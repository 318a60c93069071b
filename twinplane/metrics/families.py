"""Plain numbers as Prometheus families.

The hot path adds to plain numbers; families are built only when somebody scrapes. Nothing is
global, so two registries in one process never mix.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

PREFIX = "twinplane_"

# Each from what the fastest GPU needs to what the slowest CPU does.
STEP_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
)
REQUEST_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0),
)
TOKEN_COUNTS = tuple(float(2**power) for power in range(18))
"""1 to 131,072."""


class Histogram:
    """Counts values into fixed buckets: `bounds` are inclusive upper ends, ascending."""

    __slots__ = ("_bounds", "_counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self.total += value * count

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper end, values up to it) per bucket, the last being +Inf."""
        ends = [*map(str, self._bounds), "+Inf"]
        return [(end, float(n)) for end, n in zip(ends, accumulate(self._counts), strict=True)]


def new_registry(collector: Collector) -> CollectorRegistry:
    """A registry of its own for `collector` and for what the process and the platform say."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    return registry


def gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    """A family to which samples are added."""
    return GaugeMetricFamily(PREFIX + name, help_text, labels=labels)


def counter(name: str, help_text: str, *labels: str) -> CounterMetricFamily:
    """A family to which samples are added; the format puts `_total` behind its name."""
    return CounterMetricFamily(PREFIX + name, help_text, labels=labels)


def histogram(
    name: str, help_text: str, histograms: Mapping[tuple[str, ...], Histogram], *labels: str
) -> Metric:
    """One family. `histograms` maps the values of `labels` to a histogram each."""
    family = HistogramMetricFamily(PREFIX + name, help_text, labels=labels)
    for values, one in histograms.items():
        family.add_metric(values, buckets=one.cumulative(), sum_value=one.total)
    return family


def process_families(version: str, dropped_log_records: int) -> tuple[Metric, Metric]:
    """What every process of ours says of itself: its build, and the log records it dropped."""
    build = gauge("build_info", "This build.", "version")
    build.add_metric((version,), 1)
    dropped = counter("log_records_dropped", "Log records that could not be written.")
    dropped.add_metric((), dropped_log_records)
    return build, dropped
