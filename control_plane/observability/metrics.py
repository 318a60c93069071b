"""What Prometheus sees of the control plane.

The hot path adds to plain numbers; families are built only when somebody scrapes. Everything lives
in one Telemetry with its own registry: nothing is global, so two of them in one process never mix.
All of it is used on the event loop's thread. Telemetry and ReplicaTelemetry implement the protocols
of control_plane.shell.ports. A metric of one replica has the label `replica`, the replica's number.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from control_plane.core.account import Account
from control_plane.core.claim import EndKind
from control_plane.core.events import FinishReason, Stats
from control_plane.core.fleet import MemberState
from twinplane.metrics.families import (
    REQUEST_SECONDS,
    STEP_SECONDS,
    TOKEN_COUNTS,
    Histogram,
    counter,
    gauge,
    histogram,
    new_registry,
    process_families,
)

_CONTROL_SECONDS = (
    *(0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1),
    *(0.25, 0.5, 1.0),
)
_INTER_TOKEN_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 5.0),
    *(10.0, 30.0),
)
LOSS_CAUSES = tuple(kind.value for kind in EndKind)
MOVE_CAUSES = (
    *(MemberState.LOST.value, MemberState.GONE.value, MemberState.DRAINING.value),
    *("replaced", "relief", "failing"),
)
EXCHANGE_OUTCOMES = ("done", "refused", "lost")
_WHOLE = (FinishReason.STOP, FinishReason.LENGTH)


_NOTHING = Stats(
    **{field.name: 0 for field in dataclasses.fields(Stats) if field.type == "int"},
    finished=dict.fromkeys(FinishReason, 0),
    generated_by_weights={},
)
"""What a replica has done before its first worker."""
_NO_WORKER = {"worker_id": "", "model": "", "device": ""}


class ReplicaTelemetry:
    """The numbers of one replica."""

    def __init__(self, stats: Callable[[], Stats | None], state: Callable[[], MemberState]) -> None:
        self.stats = stats
        self.state = state
        self.worker_id = ""
        """Of the last worker; empty before the first."""
        self.worker: dict[str, str] | None = None
        """worker_id, model and device while a worker is attached."""
        self.losses = Counter(dict.fromkeys(LOSS_CAUSES, 0))
        """Claims that ended by themselves, by why."""
        self.moves = Counter(
            {(direction, cause): 0 for direction in ("in", "out") for cause in MOVE_CAUSES}
        )
        self.resync_counts = {"kept": 0, "discarded": 0}
        """Claims that took up earlier work, by whether the KV was kept or discarded."""
        self.exchanges = Counter(dict.fromkeys(EXCHANGE_OUTCOMES, 0))
        self.exchange_pause = Histogram(REQUEST_SECONDS)
        self.step = Histogram(STEP_SECONDS)
        self.step_tokens = Histogram(TOKEN_COUNTS)
        self.control = Histogram(_CONTROL_SECONDS)

    def worker_attached(
        self, *, worker_id: str, model: str, device: str, resumed: bool, kv_kept: bool
    ) -> None:
        """A worker was claimed.

        `resumed`: it takes up the work of an earlier claim. `kv_kept`: it has that claim's KV.
        """
        self.worker = {"worker_id": worker_id, "model": model, "device": device}
        self.worker_id = worker_id
        if resumed:
            self.resync_counts["kept" if kv_kept else "discarded"] += 1

    def worker_lost(self, cause: str | None) -> None:
        """The claim is over, by itself for this cause; None: the worker was let go."""
        if cause is not None and self.worker is not None:
            self.losses[cause] += 1
        self.worker = None

    def step_planned(self, token_count: int) -> None:
        """A step is to compute so many tokens."""
        self.step_tokens.observe(token_count)

    def weights_exchanged(self, outcome: str, paused_seconds: float) -> None:
        """An exchange of weights is over: done, refused or lost. No step ran for so long."""
        self.exchanges[outcome] += 1
        if outcome == "done":
            self.exchange_pause.observe(paused_seconds)

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
    of `codes`, which are the RPCs and how they usually end, and each of `reasons`, which are those
    that their errors give.
    """

    def __init__(
        self,
        version: str,
        *,
        methods: Sequence[str] = (),
        codes: Sequence[str] = (),
        reasons: Sequence[str] = (),
        dropped_log_records: Callable[[], int] = lambda: 0,
    ) -> None:
        self._version = version
        self._dropped_log_records = dropped_log_records
        self.replicas: dict[str, ReplicaTelemetry] = {}
        self._rpcs: Counter[tuple[str, str]] = Counter(
            {(method, code): 0 for method in methods for code in codes}
        )
        self._rpc_errors: Counter[str] = Counter(dict.fromkeys(reasons, 0))
        self._rpc_seconds = {method: Histogram(REQUEST_SECONDS) for method in methods}
        self._first_token = Histogram(REQUEST_SECONDS)
        self._inter_token = Histogram(_INTER_TOKEN_SECONDS)
        self._queue = Histogram(REQUEST_SECONDS)
        self._request = Histogram(REQUEST_SECONDS)
        self._prompt = Histogram(TOKEN_COUNTS)
        self._output = Histogram(TOKEN_COUNTS)
        self._resume = Histogram(REQUEST_SECONDS)
        self._registry = new_registry(self)

    def render(self) -> bytes:
        """Everything, as text format 0.0.4."""
        return generate_latest(self._registry)

    # --- what the parts report ----------------------------------------------------------------

    def replica(
        self,
        number: int,
        stats: Callable[[], Stats | None],
        state: Callable[[], MemberState] = lambda: MemberState.JOINING,
    ) -> ReplicaTelemetry:
        """The telemetry that replica `number` reports to.

        `stats` gives the counts of the replica's core at every scrape; None while it has no core.
        `state` says then where it is in its life.
        """
        name = str(number)
        assert name not in self.replicas, "two replicas of one number"
        self.replicas[name] = ReplicaTelemetry(stats, state)
        return self.replicas[name]

    def replica_left(self, number: int) -> None:
        """A replica has left for good, and its series with it."""
        del self.replicas[str(number)]

    def sequence_moved(self, source: int, target: int, cause: str) -> None:
        """A sequence went from one replica to another."""
        self.replicas[str(source)].moves["out", cause] += 1
        self.replicas[str(target)].moves["in", cause] += 1

    def sequence_resumed(self, seconds: float) -> None:
        """A sequence that ran has its next token, so long after its worker was lost or left."""
        self._resume.observe(seconds)

    def first_token(self, seconds: float) -> None:
        """A request got its first token `seconds` after it arrived."""
        self._first_token.observe(seconds)

    def token_gap(self, seconds: float, count: int) -> None:
        """`count` tokens came `seconds` after the token before them."""
        self._inter_token.observe(seconds, count)

    def sequence_ended(self, account: Account) -> None:
        """A sequence has ended, however."""
        self._queue.observe(account.queue_seconds)
        self._prompt.observe(account.usage.prompt_tokens)
        self._output.observe(account.usage.completion_tokens)
        if account.reason in _WHOLE:
            self._request.observe(account.seconds)

    def rpc_finished(self, method: str, code: str, reason: str, seconds: float) -> None:
        """An RPC ended with a status code after `seconds`. `reason` is its error's, if it had one.

        `method` must be one that is served.
        """
        self._rpcs[method, code] += 1
        if reason:
            self._rpc_errors[reason] += 1
        if method not in self._rpc_seconds:
            self._rpc_seconds[method] = Histogram(REQUEST_SECONDS)
        self._rpc_seconds[method].observe(seconds)

    # --- how they read ------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        yield from _collect_cores(self.replicas)
        yield from process_families(self._version, self._dropped_log_records())
        yield from _collect_workers(self.replicas)
        yield from self._collect_rpcs()
        for name, help_text, one in (
            ("time_to_first_token_seconds", "From arrival to the first token.", self._first_token),
            ("inter_token_latency_seconds", "Between tokens of one request.", self._inter_token),
            ("request_queue_seconds", "From arrival to the first step, or the end.", self._queue),
            ("request_duration_seconds", "From arrival to the end of an answer.", self._request),
            ("request_prompt_tokens", "Prompt tokens of a request that ended.", self._prompt),
            ("request_output_tokens", "Output tokens of a request that ended.", self._output),
            ("resume_pause_seconds", "From a worker's loss to the next token.", self._resume),
        ):
            yield histogram(name, help_text, {(): one})

    def _collect_rpcs(self) -> Iterator[Metric]:
        rpcs = counter("rpcs", "RPCs by method and status code.", "method", "code")
        for (method, code), count in self._rpcs.items():
            rpcs.add_metric((method, code), count)
        errors = counter("rpc_errors", "Refusals and failures by the error's reason.", "reason")
        for reason, count in self._rpc_errors.items():
            errors.add_metric((reason,), count)
        yield from (rpcs, errors)
        yield histogram(
            "rpc_duration_seconds",
            "From an RPC's arrival to its end.",
            {(method,): one for method, one in self._rpc_seconds.items()},
            "method",
        )


def _collect_workers(replicas: Mapping[str, ReplicaTelemetry]) -> Iterator[Metric]:
    labels = ("worker_id", "model", "device")
    up = _gauge("worker_up", "1 while a worker is attached.")
    info = _gauge("worker_info", "The attached worker; 0 while there is none.", *labels)
    losses = _counter("worker_losses", "Claims that ended by themselves, by why.", "cause")
    states = _gauge("replica_state", "1 for the state that it is in.", "worker_id", "state")
    moves = _counter(
        "sequence_moves", "Sequences that went from replica to replica.", "direction", "cause"
    )
    exchanges = _counter(
        "weights_exchanges", "Exchanges of a replica's weights, by what came of them.", "outcome"
    )
    resyncs = _counter(
        "worker_resyncs", "Claims that took up earlier work, by what became of the KV.", "kv"
    )
    for number, replica in replicas.items():
        up.add_metric((number,), int(replica.worker is not None))
        worker = replica.worker or _NO_WORKER
        info.add_metric((number, *(worker[label] for label in labels)), replica.worker is not None)
        for cause, count in replica.losses.items():
            losses.add_metric((number, cause), count)
        now = replica.state()
        for state in MemberState:
            states.add_metric((number, replica.worker_id, state.value), int(state is now))
        for (direction, cause), count in replica.moves.items():
            moves.add_metric((number, direction, cause), count)
        for outcome, count in replica.exchanges.items():
            exchanges.add_metric((number, outcome), count)
        for kv, count in replica.resync_counts.items():
            resyncs.add_metric((number, kv), count)
    yield from (up, info, losses, resyncs, states, moves, exchanges)
    yield histogram(
        "weights_exchange_pause_seconds",
        "For how long no step ran while weights were exchanged.",
        {(number,): replica.exchange_pause for number, replica in replicas.items()},
        "replica",
    )
    yield histogram(
        "step_duration_seconds",
        "Execution of a step, as its worker reports it.",
        {(number,): replica.step for number, replica in replicas.items()},
        "replica",
    )
    yield histogram(
        "step_tokens",
        "Tokens that a step computes.",
        {(number,): replica.step_tokens for number, replica in replicas.items()},
        "replica",
    )
    yield histogram(
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
    adapters = _counter(
        "adapter_events", "What became of adapters and who asked for them.", "event"
    )
    adapters_waiting = _gauge("adapter_waiters", "Requests that wait for their adapter.")
    submitted = _counter("requests_submitted", "Requests that were accepted.")
    finished = _counter("requests_finished", "Requests by how they ended.", "reason")
    tokens = _counter("tokens", "Tokens by kind.", "kind")
    by_weights = _counter(
        "weights_tokens", "Tokens handed out, by the last weights that made them.", "weights"
    )
    for number, replica in replicas.items():
        stats = replica.stats() or _NOTHING
        running.add_metric((number,), stats.running)
        waiting.add_metric((number,), stats.waiting)
        inflight.add_metric((number,), stats.inflight)
        kv_tokens.add_metric((number, "active"), stats.kv_active_tokens)
        kv_tokens.add_metric((number, "cached"), stats.kv_cached_tokens)
        kv_tokens.add_metric((number, "free"), stats.kv_free_tokens)
        preemptions.add_metric((number,), stats.preemptions)
        adapters_waiting.add_metric((number,), stats.adapters_waiting)
        for event, count in (
            ("hit", stats.adapter_hits),
            ("wait", stats.adapter_waits),
            ("load", stats.adapter_loads),
            ("failure", stats.adapter_failures),
            ("eviction", stats.adapter_evictions),
        ):
            adapters.add_metric((number, event), count)
        submitted.add_metric((number,), stats.submitted)
        for reason, count in stats.finished.items():
            finished.add_metric((number, reason.value), count)
        for label, count in (stats.generated_by_weights or {"": 0}).items():
            by_weights.add_metric((number, label), count)
        tokens.add_metric((number, "prompt_computed"), stats.prompt_tokens)
        tokens.add_metric((number, "prompt_cached"), stats.cached_prompt_tokens)
        tokens.add_metric((number, "recomputed"), stats.recomputed_tokens)
        tokens.add_metric((number, "generated"), stats.generated_tokens)
    yield from (running, waiting, inflight, kv_tokens, preemptions, submitted, finished, tokens)
    yield from (adapters, adapters_waiting)
    yield by_weights


def _gauge(name: str, help_text: str, *labels: str) -> GaugeMetricFamily:
    """A gauge per replica."""
    return gauge(name, help_text, "replica", *labels)


def _counter(name: str, help_text: str, *labels: str) -> CounterMetricFamily:
    """A counter per replica."""
    return counter(name, help_text, "replica", *labels)
