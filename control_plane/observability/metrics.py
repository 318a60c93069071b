"""What Prometheus sees of the control plane.

The hot path adds to plain numbers; families are built only when somebody scrapes. Everything lives
in one Telemetry with its own registry: nothing is global, so two of them in one process never mix.
All of it is used on the event loop's thread. Telemetry and ReplicaTelemetry implement the protocols
of control_plane.shell.ports. A metric of one replica has the label `replica`, the replica's number.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from control_plane.core.events import FinishReason, Stats

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4

_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_CONTROL_SECONDS = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1)
_FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_INTER_TOKEN_SECONDS = (0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)


_NOTHING = Stats(
    **{field.name: 0 for field in dataclasses.fields(Stats) if field.name != "finished"},
    finished=dict.fromkeys(FinishReason, 0),
)
"""What a replica has done before its first worker."""
_NO_WORKER = {"worker_id": "", "model": "", "device": ""}


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


class ReplicaTelemetry:
    """The numbers of one replica."""

    def __init__(self, stats: Callable[[], Stats | None]) -> None:
        self.stats = stats
        self.worker: dict[str, str] | None = None
        """worker_id, model and device while a worker is attached."""
        self.loss_count = 0
        self.resync_counts = {"kept": 0, "discarded": 0}
        """Claims that took up earlier work, by whether the KV was kept or discarded."""
        self.step = Histogram(_STEP_SECONDS)
        self.control = Histogram(_CONTROL_SECONDS)

    def worker_attached(
        self, *, worker_id: str, model: str, device: str, resumed: bool, kv_kept: bool
    ) -> None:
        """A worker was claimed.

        `resumed`: it takes up the work of an earlier claim. `kv_kept`: it has that claim's KV.
        """
        self.worker = {"worker_id": worker_id, "model": model, "device": device}
        if resumed:
            self.resync_counts["kept" if kv_kept else "discarded"] += 1

    def worker_lost(self) -> None:
        """The claim is over."""
        self.loss_count += self.worker is not None
        self.worker = None

    def step_finished(self, executed_seconds: float, control_seconds: float) -> None:
        """A step is over.

        The worker took `executed_seconds` to execute it, as its result says; the control plane
        spent `control_seconds` on its schedule, update and delivery.
        """
        self.step.observe(executed_seconds)
        self.control.observe(control_seconds)


class Telemetry(Collector):
    """The numbers, and how they read as metrics.

    Every series that can be known is there from the first scrape, so that a rate over it has a
    start: that of each replica, with a worker or without, and that of each of `methods` with each
    of `codes`, which are the RPCs and how they usually end.
    """

    def __init__(
        self,
        version: str,
        *,
        methods: Sequence[str] = (),
        codes: Sequence[str] = (),
        dropped_log_records: Callable[[], int] = lambda: 0,
    ) -> None:
        self._version = version
        self._dropped_log_records = dropped_log_records
        self.replicas: dict[str, ReplicaTelemetry] = {}
        self._rpcs: Counter[tuple[str, str]] = Counter(
            {(method, code): 0 for method in methods for code in codes}
        )
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

    def replica(self, number: int, stats: Callable[[], Stats | None]) -> ReplicaTelemetry:
        """The telemetry that replica `number` reports to.

        `stats` gives the counts of the replica's core at every scrape; None while it has no core.
        """
        name = str(number)
        assert name not in self.replicas, "two replicas of one number"
        self.replicas[name] = ReplicaTelemetry(stats)
        return self.replicas[name]

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
        yield from _collect_cores(self.replicas)
        build = GaugeMetricFamily("twinplane_build_info", "This build.", labels=("version",))
        build.add_metric((self._version,), 1)
        yield build
        dropped = CounterMetricFamily(
            "twinplane_log_records_dropped", "Log records that could not be written."
        )
        dropped.add_metric((), self._dropped_log_records())
        yield dropped
        yield from _collect_workers(self.replicas)
        rpcs = CounterMetricFamily(
            "twinplane_rpcs", "RPCs by method and status code.", labels=("method", "code")
        )
        for (method, code), count in self._rpcs.items():
            rpcs.add_metric((method, code), count)
        yield rpcs
        yield _histogram(
            "time_to_first_token_seconds",
            "From arrival to the first token.",
            {(): self._first_token},
        )
        yield _histogram(
            "inter_token_latency_seconds",
            "Between tokens of one request.",
            {(): self._inter_token},
        )


def _collect_workers(replicas: Mapping[str, ReplicaTelemetry]) -> Iterator[Metric]:
    labels = ("worker_id", "model", "device")
    up = _gauge("worker_up", "1 while a worker is attached.")
    info = _gauge("worker_info", "The attached worker; 0 while there is none.", *labels)
    losses = _counter("worker_losses", "Claims that ended by themselves.")
    resyncs = _counter(
        "worker_resyncs", "Claims that took up earlier work, by what became of the KV.", "kv"
    )
    for number, replica in replicas.items():
        up.add_metric((number,), int(replica.worker is not None))
        worker = replica.worker or _NO_WORKER
        info.add_metric((number, *(worker[label] for label in labels)), replica.worker is not None)
        losses.add_metric((number,), replica.loss_count)
        for kv, count in replica.resync_counts.items():
            resyncs.add_metric((number, kv), count)
    yield from (up, info, losses, resyncs)
    yield _histogram(
        "step_duration_seconds",
        "Execution of a step, as its worker reports it.",
        {(number,): replica.step for number, replica in replicas.items()},
        "replica",
    )
    yield _histogram(
        "step_control_seconds",
        "Control plane work of one step.",
        {(number,): replica.control for number, replica in replicas.items()},
        "replica",
    )


def _collect_cores(replicas: Mapping[str, ReplicaTelemetry]) -> Iterator[Metric]:
    """The cores' counts; a replica that had no worker yet has counted nothing."""
    running = _gauge("requests_running", "Requests in the persistent batch.")
    waiting = _gauge("requests_waiting", "Requests that wait to run.")
    inflight = _gauge("steps_in_flight", "Plans without their results yet.")
    kv_tokens = _gauge("kv_tokens", "KV slots of the pool by state.", "state")
    preemptions = _counter("preemptions", "Requests put back to free blocks.")
    submitted = _counter("requests_submitted", "Requests that were accepted.")
    finished = _counter("requests_finished", "Requests by how they ended.", "reason")
    tokens = _counter("tokens", "Tokens by kind.", "kind")
    for number, replica in replicas.items():
        stats = replica.stats() or _NOTHING
        running.add_metric((number,), stats.running)
        waiting.add_metric((number,), stats.waiting)
        inflight.add_metric((number,), stats.inflight)
        kv_tokens.add_metric((number, "active"), stats.kv_active_tokens)
        kv_tokens.add_metric((number, "cached"), stats.kv_cached_tokens)
        kv_tokens.add_metric((number, "free"), stats.kv_free_tokens)
        preemptions.add_metric((number,), stats.preemptions)
        submitted.add_metric((number,), stats.submitted)
        for reason, count in stats.finished.items():
            finished.add_metric((number, reason.value), count)
        tokens.add_metric((number, "prompt_computed"), stats.prompt_tokens)
        tokens.add_metric((number, "prompt_cached"), stats.cached_prompt_tokens)
        tokens.add_metric((number, "recomputed"), stats.recomputed_tokens)
        tokens.add_metric((number, "generated"), stats.generated_tokens)
    yield from (running, waiting, inflight, kv_tokens, preemptions, submitted, finished, tokens)


def _gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    """A gauge per replica."""
    return GaugeMetricFamily(f"twinplane_{name}", help_text, labels=("replica", *labels))


def _counter(name: str, help_text: str, *labels: str) -> CounterMetricFamily:
    """A counter per replica."""
    return CounterMetricFamily(f"twinplane_{name}", help_text, labels=("replica", *labels))


def _histogram(
    name: str, help_text: str, histograms: Mapping[tuple[str, ...], Histogram], *labels: str
) -> Metric:
    """One family. `histograms` maps the values of `labels` to a histogram each."""
    family = HistogramMetricFamily(f"twinplane_{name}", help_text, labels=labels)
    for values, histogram in histograms.items():
        family.add_metric(values, buckets=histogram.cumulative(), sum_value=histogram.total)
    return family
