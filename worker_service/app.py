"""The worker's composition root: builds the parts, runs them, and takes them down in order."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path

from twinplane import __version__
from twinplane.grpc.listen import CannotListen, check_addresses
from twinplane.metrics.server import CannotServeMetrics, MetricsServer
from twinplane.models import ModelError
from twinplane.paths import as_text
from twinplane.process.event_loop import new_event_loop
from twinplane.process.exit import exit_by
from twinplane.process.logs import dropped_record_count, fields
from twinplane.process.stop_signals import StopSignals
from twinplane.settings.worker import WorkerConfig
from worker_service.domain.capability import MemoryPool
from worker_service.domain.errors import WorkerError
from worker_service.facade import WorkerFacade
from worker_service.lifecycle import Lifecycle, LifecycleState
from worker_service.load_errors import LoadError
from worker_service.rpc.server import WorkerServer
from worker_service.runner.interface import Runner
from worker_service.startup import StartupError, start_runner
from worker_service.telemetry import WorkerTelemetry

_STOP_GRACE_SECONDS = 2.0
_PROGRESS_SECONDS = 1.0
# A controller that has anything to run sends the next plan milliseconds after a result.
_QUIET_SECONDS = 1.0

_logger = logging.getLogger(__name__)


def run(config: WorkerConfig) -> int:
    """Serves until a signal or the worker's own end; returns the exit code.

    The first signal drains, a second one ends the process at once.
    """
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_run(config))


async def _run(config: WorkerConfig) -> int:
    progress = _ProgressLog(time.monotonic)
    with StopSignals(watch_stdin=config.exit_with_parent) as signals:
        serving = asyncio.create_task(
            serve(config, signals.first, lambda: start_runner(config, progress))
        )
        hurrying = asyncio.create_task(signals.second.wait())
        await asyncio.wait((serving, hurrying), return_when=asyncio.FIRST_COMPLETED)
        hurrying.cancel()
        if signals.hurried_by is not None:
            _logger.info("stopped", extra=fields(reason=f"a second {signals.hurried_by.name}"))
            exit_by(signals.hurried_by)
        failure = await serving
    if failure:
        _logger.error("stopped", extra=fields(reason=failure, broken=True))
        return 1
    _logger.info("stopped", extra=fields(reason=signals.reason, broken=False))
    return 0


async def serve(config: WorkerConfig, stop: asyncio.Event, build: Callable[[], Runner]) -> str:
    """Serves the runner that `build` makes until `stop` is set or the worker breaks.

    The server answers at once; loading goes on behind it. Returns "" after a drain, else what went
    wrong, as "the worker" would be followed by it: "could not load: …".
    """
    telemetry = WorkerTelemetry(__version__, lambda: facade.lifecycle.state, dropped_record_count)
    facade = WorkerFacade(
        build,
        worker_id=_worker_id(config),
        incarnation_id=uuid.uuid4().hex,
        metrics=telemetry,
        update_metrics=telemetry,
    )
    server = WorkerServer(facade, weights_root=_weights_root(config))
    async with AsyncExitStack() as stack:
        try:
            check_addresses(
                config.host,
                config.port,
                _socket_path(config),
                config.metrics_host,
                config.metrics_port,
            )
            metrics_port = await _start_metrics(config, telemetry, facade, stack)
            address = await server.start(config.host, config.port, _socket_path(config))
        except (CannotListen, CannotServeMetrics) as error:
            await facade.close()
            return str(error)
        _logger.info("listening", extra=fields(address=address, metrics_port=metrics_port))
        loading = asyncio.create_task(_load(facade))
        try:
            await _first_of(stop, facade.lifecycle)
            await _drain(facade, server, loading, config.drain_seconds)
        finally:
            loading.cancel()
            await asyncio.wait((loading,))
            await server.stop(_STOP_GRACE_SECONDS)
    if facade.lifecycle.state is not LifecycleState.BROKEN:
        return ""
    failure = "" if loading.cancelled() else loading.result()
    return failure or f"broke: {facade.broken_by}"


async def _start_metrics(
    config: WorkerConfig, telemetry: WorkerTelemetry, facade: WorkerFacade, stack: AsyncExitStack
) -> int | None:
    """Serves metrics and probes until the stack ends. Raises CannotServeMetrics."""
    if config.metrics_port is None:
        return None
    server = MetricsServer(
        telemetry.render,
        lambda: facade.lifecycle.is_ready,
        lambda: telemetry.refresh(facade.memory_pool),
    )
    port = await server.start(config.metrics_host, config.metrics_port)
    stack.push_async_callback(server.close)
    return port


async def _load(facade: WorkerFacade) -> str:
    """Loads the model. Returns "", or why that is impossible."""
    try:
        await facade.load()
    except (StartupError, ModelError, LoadError) as error:
        _logger.error("cannot load", extra=fields(reason=str(error)))
        return f"could not load: {error}"
    except Exception as error:  # bad model files can raise anything: the worker says why, and ends
        _logger.exception("cannot load")
        text = " ".join(str(error).split())
        return f"could not load: {type(error).__name__}: {text}".rstrip(": ")
    with suppress(WorkerError):  # it was told to end meanwhile
        if facade.lifecycle.state is LifecycleState.ACTIVE:
            _log_ready(facade, await facade.memory_pool())
    return ""


async def _first_of(stop: asyncio.Event, lifecycle: Lifecycle) -> None:
    """Waits until `stop` is set or the worker is broken."""
    waits = (asyncio.create_task(stop.wait()), asyncio.create_task(_broken(lifecycle)))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


async def _broken(lifecycle: Lifecycle) -> None:
    state = lifecycle.state
    while state is not LifecycleState.BROKEN:
        state = await lifecycle.changed_from(state)


async def _drain(
    facade: WorkerFacade, server: WorkerServer, loading: asyncio.Task[str], seconds: float
) -> None:
    """Goes on with the controller that holds this worker until it lets go, then ends the streams,
    and lets what is queued finish."""
    if facade.lifecycle.state is not LifecycleState.BROKEN:
        _logger.info("draining")
    facade.finish()
    if not loading.done():
        return  # nothing was accepted yet, and a load can't be interrupted
    try:
        async with asyncio.timeout(seconds):
            if facade.lifecycle.state is not LifecycleState.BROKEN:
                await server.released(_QUIET_SECONDS)
            facade.drain()
            server.end_streams()
            await facade.close()
    except TimeoutError:
        _logger.warning("drain timed out", extra=fields(seconds=seconds))
        facade.hurry()
        facade.drain()
        server.end_streams()


def _socket_path(config: WorkerConfig) -> Path | None:
    return None if config.uds is None else Path(config.uds).expanduser()


def _weights_root(config: WorkerConfig) -> Path | None:
    return None if config.weights_root is None else Path(config.weights_root).expanduser()


def _worker_id(config: WorkerConfig) -> str:
    if config.worker_id is not None:
        return as_text(config.worker_id)
    return as_text(f"{socket.gethostname()}:{config.uds or config.port}")


class _ProgressLog:
    """Logs the progress of a load, at most once a second, because every layer reports a line.

    Called on the device thread. `clock` gives seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._last = -math.inf

    def __call__(self, doing: str) -> None:
        now = self._clock()
        if now - self._last >= _PROGRESS_SECONDS:
            self._last = now
            _logger.info("loading", extra=fields(doing=doing))


def _log_ready(facade: WorkerFacade, pool: MemoryPool) -> None:
    """Says what is served, what it takes of the device's memory, and how much that holds."""
    info = facade.worker_info()
    capability, limits = info.capability, info.capability.limits
    _logger.info(
        "ready",
        extra=fields(
            worker_id=info.worker_id,
            model=capability.model.name,
            device=capability.device.name,
            data_type=capability.model.data_type.value,
            executor=capability.executor,
            attention_backend=capability.attention_backend,
            weight_version=capability.weight_version.digest[:12],
            max_sequence_count=limits.max_sequence_count,
            max_sequence_token_count=limits.max_sequence_token_count,
            kv_token_count=pool.token_count,
            kv_bytes_per_token=pool.bytes_per_block // pool.block_token_count,
            full_length_sequence_count=min(
                pool.sequences_of(limits.max_sequence_token_count), limits.max_sequence_count
            ),
            weights_bytes=pool.weights_bytes,
            kv_bytes=pool.kv_bytes,
            workspace_bytes=pool.workspace_bytes,
            adapters_bytes=pool.adapters_bytes,
            free_bytes=pool.free_bytes,
        ),
    )
