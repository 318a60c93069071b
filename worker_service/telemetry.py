"""What Prometheus sees of a worker: its device's memory, its steps by kind, its state.

Used on the event loop only. The pool is what the device thread last said of it (`refresh`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from enum import Enum

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from twinplane.metrics.families import (
    STEP_SECONDS,
    Histogram,
    counter,
    gauge,
    histogram,
    new_registry,
    process_families,
)
from worker_service.domain.capability import MemoryPool
from worker_service.domain.errors import WorkerError
from worker_service.domain.plan import SamplePlan, StepPlan, StepResult
from worker_service.domain.weights import UpdateOutcome
from worker_service.lifecycle import LifecycleState

_MEMORY_KINDS = ("weights", "kv", "workspace", "adapters", "prepared", "kept_tensors", "free")
_UPDATE_SECONDS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0, 1800.0)
_REFRESH_SECONDS = 0.25
"""How long a scrape waits for a device that is busy; then it gets the numbers of the last one."""


class StepKind(Enum):
    """What a step computes for its rows."""

    DECODE = "decode"
    """One token each, and drafts."""
    PROMPT = "prompt"
    """Several tokens each: pieces of prompts, or of what is recomputed."""
    MIXED = "mixed"
    SAMPLE = "sample"
    """Nothing: it samples rows that were held."""


def kind_of(plan: StepPlan | SamplePlan) -> StepKind | None:
    """The kind of a step; None for a plan that runs no row."""
    if isinstance(plan, SamplePlan):
        return StepKind.SAMPLE
    counts = plan.scheduled.sure_counts
    if not counts.size:
        return None
    several = int((counts > 1).sum())
    if not several:
        return StepKind.DECODE
    return StepKind.PROMPT if several == counts.size else StepKind.MIXED


class WorkerTelemetry(Collector):
    """The numbers of one worker, and how they read as metrics.

    Every series is there from the first scrape, while the worker still loads.
    """

    def __init__(
        self,
        version: str,
        state: Callable[[], LifecycleState],
        dropped_log_records: Callable[[], int] = lambda: 0,
    ) -> None:
        self._version = version
        self._state = state
        self._dropped_log_records = dropped_log_records
        self._seconds = {kind: Histogram(STEP_SECONDS) for kind in StepKind}
        self._queued = Histogram(STEP_SECONDS)
        self._failed_count = 0
        self._prepare_seconds = Histogram(_UPDATE_SECONDS)
        self._pause_seconds = Histogram(_UPDATE_SECONDS)
        self._updates = dict.fromkeys(UpdateOutcome, 0)
        self._pool: MemoryPool | None = None
        self._asking: asyncio.Future[MemoryPool] | None = None
        self._registry = new_registry(self)

    def render(self) -> bytes:
        """Everything, as text format 0.0.4."""
        return generate_latest(self._registry)

    # --- what the parts report ----------------------------------------------------------------

    def step_finished(self, plan: StepPlan | SamplePlan, result: StepResult) -> None:
        """A step was executed."""
        kind = kind_of(plan)
        if kind is not None:
            self._seconds[kind].observe(result.executed_seconds)
            self._queued.observe(result.queued_seconds)

    def step_failed(self) -> None:
        """A step was refused, or the device failed on it."""
        self._failed_count += 1

    def update_prepared(self, seconds: float) -> None:
        """See UpdateMetrics."""
        self._prepare_seconds.observe(seconds)

    def update_ended(self, outcome: UpdateOutcome, seconds: float = 0.0) -> None:
        """See UpdateMetrics."""
        self._updates[outcome] += 1
        if outcome is UpdateOutcome.COMMITTED:
            self._pause_seconds.observe(seconds)

    async def refresh(self, ask: Callable[[], Awaitable[MemoryPool]]) -> None:
        """Takes over what `ask` says of the memory, unless the device is busy for long.

        One question at a time: a busy device is not asked again.
        """
        if self._asking is None:
            self._asking = asyncio.ensure_future(ask())
            self._asking.add_done_callback(self._answered)
        await asyncio.wait((self._asking,), timeout=_REFRESH_SECONDS)

    def _answered(self, answer: asyncio.Future[MemoryPool]) -> None:
        self._asking = None
        if answer.cancelled():
            return
        error = answer.exception()
        if error is None:
            self._pool = answer.result()
        elif not isinstance(error, WorkerError):  # those say that it loads, stops or has failed
            raise error

    # --- how they read ------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """The families of one scrape."""
        yield from process_families(self._version, self._dropped_log_records())
        yield from self._collect_memory()
        state = gauge("worker_state", "1 for the state that the worker is in.", "state")
        for one in LifecycleState:
            state.add_metric((one.value,), one is self._state())
        failed = counter("worker_steps_failed", "Steps that were refused, or failed.")
        failed.add_metric((), self._failed_count)
        yield from (state, failed)
        yield histogram(
            "worker_step_seconds",
            "Execution of a step on the device, by what it computes.",
            {(kind.value,): one for kind, one in self._seconds.items()},
            "kind",
        )
        yield histogram(
            "worker_step_queue_seconds",
            "From a step's arrival to its start on the device.",
            {(): self._queued},
        )
        yield from self._collect_updates()

    def _collect_updates(self) -> Iterator[Metric]:
        updates = counter("worker_weight_updates", "Weight updates by how they ended.", "outcome")
        for outcome, count in self._updates.items():
            updates.add_metric((outcome.value,), count)
        yield updates
        yield histogram(
            "worker_weight_update_prepare_seconds",
            "From an update's description to weights that wait for their commit.",
            {(): self._prepare_seconds},
        )
        yield histogram(
            "worker_weight_update_pause_seconds",
            "For how long a commit held up steps.",
            {(): self._pause_seconds},
        )

    def _collect_memory(self) -> Iterator[Metric]:
        pool = self._pool
        memory = gauge("worker_memory_bytes", "Memory of the device by use.", "kind")
        blocks = gauge("worker_kv_blocks", "Blocks of the KV pool by state.", "state")
        kinds, states = dict.fromkeys(_MEMORY_KINDS, 0), dict.fromkeys(("used", "free"), 0)
        if pool is not None:
            kinds = {
                "weights": pool.weights_bytes,
                "kv": pool.kv_bytes,
                "workspace": pool.workspace_bytes,
                "adapters": pool.adapters_bytes,
                "prepared": pool.prepared_bytes,
                "kept_tensors": pool.kept_tensors_bytes,
                "free": pool.free_bytes,
            }
            states = {"used": pool.used_block_count, "free": pool.free_block_count}
        for kind, value in kinds.items():
            memory.add_metric((kind,), value)
        for state, value in states.items():
            blocks.add_metric((state,), value)
        yield from (memory, blocks)
