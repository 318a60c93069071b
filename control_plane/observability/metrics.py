"""What Prometheus sees of the control plane.

The hot path adds to plain numbers; families are built only when somebody scrapes. Everything lives
in one Telemetry with its own registry: nothing is global, so two of them in one process never mix.
All of it is used on the event loop's thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector

from control_plane.core.events import Stats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_CONTROL_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


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


class Telemetry(Collector):
    """The numbers, and how they read as metrics."""

    def __init__(self, version: str) -> None:
        self._version = version
        self._stats: Callable[[], Stats | None] = lambda: None
        self._worker: dict[str, str] | None = None
        self._resync_count = 0
        self._loss_count = 0
        self._rpcs: Counter[tuple[str, str]] = Counter()
        self._step = Histogram(_STEP_SECONDS)
        self._control = Histogram(_CONTROL_SECONDS)
        self._first_token = Histogram(_FIRST_TOKEN_SECONDS)
        self._inter_token = Histogram(_INTER_TOKEN_SECONDS)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def render(self) -> bytes:
        """Everything, as text format 0.0.4."""
        return generate_latest(self._registry)

    # --- what the parts report ----------------------------------------------------------------

    def follow(self, stats: Callable[[], Stats | None]) -> None:
        """Asks the core for its own counts at every scrape; None while there is no core."""
        self._stats = stats

    def worker_attached(self, *, worker_id: str, model: str, device: str, resumed: bool) -> None:
        """A worker was claimed; `resumed` says that work went on from an earlier claim."""
        self._worker = {"worker_id": worker_id, "model": model, "device": device}
        self._resync_count += resumed

    def worker_lost(self) -> None:
        """The claim is over."""
        self._loss_count += self._worker is not None
        self._worker = None

    def step_finished(self, seconds: float) -> None:
        """A step took the worker `seconds` to execute, as its result says."""
        self._step.observe(seconds)

    def control_work(self, seconds: float) -> None:
        """The control plane spent `seconds` on a step: its schedule, update and delivery."""
        self._control.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A request got its first token `seconds` after it arrived."""
        self._first_token.observe(seconds)

    def token_gap(self, seconds: float, count: int) -> None:
        """`count` tokens came `seconds` after the token before them."""
        self._inter_token.observe(seconds, count)

    def rpc_finished(self, method: str, code: str) -> None:
        """An RPC ended with a status code. `method` must be one that is served."""
        self._rpcs[method, code] += 1

    # --- how they read ------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        stats = self._stats()
        if stats is not None:
            yield from _collect_core(stats)
        yield from self._collect_worker()
        rpcs = CounterMetricFamily(
            "twinplane_rpcs", "RPCs by method and status code.", labels=("method", "code")
        )
        for (method, code), count in self._rpcs.items():
            rpcs.add_metric((method, code), count)
        yield rpcs
        yield _histogram(
            "step_duration_seconds", "Execution of a step, as its worker reports it.", self._step
        )
        yield _histogram("step_control_seconds", "Control plane work of one step.", self._control)
        yield _histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", self._first_token
        )
        yield _histogram(
            "inter_token_latency_seconds", "Between tokens of one request.", self._inter_token
        )

    def _collect_worker(self) -> Iterator[Metric]:
        build = GaugeMetricFamily("twinplane_build_info", "This build.", labels=("version",))
        build.add_metric((self._version,), 1)
        yield build
        yield GaugeMetricFamily(
            "twinplane_worker_up", "1 while a worker is attached.", int(self._worker is not None)
        )
        labels = ("worker_id", "model", "device")
        info = GaugeMetricFamily("twinplane_worker_info", "The attached worker.", labels=labels)
        if self._worker is not None:
            info.add_metric([self._worker[label] for label in labels], 1)
        yield info
        yield CounterMetricFamily(
            "twinplane_worker_losses", "Claims that ended by themselves.", self._loss_count
        )
        yield CounterMetricFamily(
            "twinplane_worker_resyncs", "Claims that took up earlier work.", self._resync_count
        )


def _collect_core(stats: Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily(
        "twinplane_requests_running", "Requests in the persistent batch.", stats.running
    )
    yield GaugeMetricFamily(
        "twinplane_requests_waiting", "Requests that wait to run.", stats.waiting
    )
    yield GaugeMetricFamily(
        "twinplane_steps_in_flight", "Plans without their results yet.", stats.inflight
    )
    kv_tokens = GaugeMetricFamily(
        "twinplane_kv_tokens", "KV slots of the pool by state.", labels=("state",)
    )
    kv_tokens.add_metric(("active",), stats.kv_active_tokens)
    kv_tokens.add_metric(("cached",), stats.kv_cached_tokens)
    kv_tokens.add_metric(("free",), stats.kv_free_tokens)
    yield kv_tokens
    yield CounterMetricFamily(
        "twinplane_preemptions", "Requests put back to free blocks.", stats.preemptions
    )
    yield CounterMetricFamily(
        "twinplane_requests_submitted", "Requests that were accepted.", stats.submitted
    )
    finished = CounterMetricFamily(
        "twinplane_requests_finished", "Requests by how they ended.", labels=("reason",)
    )
    for reason, count in stats.finished.items():
        finished.add_metric((reason.value,), count)
    yield finished
    tokens = CounterMetricFamily("twinplane_tokens", "Tokens by kind.", labels=("kind",))
    tokens.add_metric(("prompt_computed",), stats.prompt_tokens)
    tokens.add_metric(("prompt_cached",), stats.cached_prompt_tokens)
    tokens.add_metric(("recomputed",), stats.recomputed_tokens)
    tokens.add_metric(("generated",), stats.generated_tokens)
    yield tokens


def _histogram(name: str, help_text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(
        f"twinplane_{name}", help_text, buckets=histogram.cumulative(), sum_value=histogram.total
    )
