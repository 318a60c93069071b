"""The composition root: builds the control plane from its settings, runs it, takes it down."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import secrets
import socket
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from control_plane.admin import check_admin, open_rollouts, run_beside, start_admin
from control_plane.core.claim import ClaimPolicy
from control_plane.core.request import SamplingParams
from control_plane.observability.metrics import Telemetry
from control_plane.rpc.door import EngineDoor
from control_plane.rpc.errors import CODES, REASONS, status_of
from control_plane.rpc.inference_servicer import InferenceServicer
from control_plane.rpc.request_log import RequestLog
from control_plane.rpc.server import (
    CONTROL_METHODS,
    INFERENCE_METHODS,
    MAX_REQUEST_BYTES,
    ControlServer,
    inference_service,
)
from control_plane.rpc.workers import place_at, worker_at
from control_plane.shell.fleet import Fleet
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.membership import Membership
from control_plane.shell.ports import Clock
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.rollout_store import StoreUnusable
from control_plane.shell.successor import ArithmeticChange
from control_plane.shell.worker_lists import ListedInDns, ListedInFile, WorkerList
from control_plane.shell.workers import serving_worker
from control_plane.text.errors import ModelFilesInvalid
from control_plane.text.model_files import TextModel, load_text_model
from control_plane.text.processor import TextLimits, TextProcessor
from control_plane.text.sampling_defaults import SamplingDefaults, read_sampling_defaults
from control_plane.text.template_pool import TemplatePool
from control_plane.text.vocabulary import VocabularyCheck
from twinplane import __version__
from twinplane.grpc.health import SettableReadiness
from twinplane.grpc.interceptors import CallEnd, StatusInterceptor
from twinplane.grpc.listen import CannotListen, check_addresses
from twinplane.metrics.server import CannotServeMetrics, MetricsServer
from twinplane.models import ModelError, default_sampling, resolve
from twinplane.paths import as_text
from twinplane.process.event_loop import new_event_loop
from twinplane.process.garbage import settle_collector
from twinplane.process.logs import dropped_record_count, fields
from twinplane.process.stop_signals import StopEvents, StopSignals
from twinplane.settings.control import ControlConfig

_logger = logging.getLogger(__name__)

# After a drain, calls only have their status to send.
_STOP_GRACE_SECONDS = 2.0
# From the start on, a request waits for the first claim of a worker so long and no longer.
_FIRST_CLAIM_SECONDS = 1.0
# Workers have no more, unless they are told to.
_USUAL_ROWS = 256


def run(config: ControlConfig) -> int:
    """Serves until SIGINT or SIGTERM; returns the process's exit code, 0 after a clean stop."""
    try:
        # Before the model is loaded, which may take long.
        check_addresses(
            config.host,
            config.port,
            _socket_path(config),
            config.metrics_host,
            config.metrics_port,
        )
        check_admin(config)
        folder = resolve(config.model, weights=False)
        text_model = load_text_model(folder, trust_messages=config.trust_message_special_tokens)
        sampling = sampling_defaults(config, folder)
    except CannotListen as error:
        return _failed(str(error))
    except (ModelError, ModelFilesInvalid) as error:
        return _failed(f"can't serve the model: {error}")
    name = as_text(config.served_model_name or served_name(config.model))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(_serve(config, name, text_model, sampling.values, folder))


def sampling_defaults(config: ControlConfig, folder: Path) -> SamplingDefaults:
    """What holds for a request's unset sampling parameters. Raises ModelFilesInvalid."""
    if config.generation_config == "none":
        return SamplingDefaults()
    defaults = read_sampling_defaults(folder, default_sampling(folder))
    if defaults.source:
        values = asdict(defaults.values)
        _logger.info("sampling defaults", extra=fields(source=defaults.source, **values))
    if defaults.not_applied:
        _logger.warning(
            "the model's files ask for sampling that is not applied",
            extra=fields(file=defaults.source, ignored=", ".join(defaults.not_applied)),
        )
    return defaults


def _failed(reason: str) -> int:
    """Says as the last line why the control plane ends. `reason` follows its name in a sentence."""
    _logger.error("stopped", extra=fields(reason=reason))
    return 1


def served_name(model: str) -> str:
    """The name clients use when none was chosen: a folder's or file's own, or the id as it is."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.suffix == ".gguf" else model


class NameCheck:
    """Tells when the worker calls its model otherwise than this control plane does.

    Clients use the control plane's name, whatever was given to the worker; and two names may be two
    models. `own` are the names that say nothing new.
    """

    def __init__(self, *own: str) -> None:
        self._known = set(own)
        self._served = own[0]

    def meet(self, name: str) -> None:
        """Looks at a worker's name for its model; says each name once."""
        # A path says where the worker has it, which may be on another machine.
        if not {name, served_name(name), Path(name).name} & self._known:
            self._known.add(name)
            _logger.warning(
                "the worker has another name for its model",
                extra=fields(worker_model=name, served_model_name=self._served),
            )


class FirstClaim:
    """The first seconds of a control plane, whose worker is probably there.

    Clients that resume come the moment it listens: they need not be sent away for a claim that
    takes milliseconds.
    """

    def __init__(self, clock: Clock) -> None:
        self.made = asyncio.Event()
        self._clock = clock
        self._until = clock() + _FIRST_CLAIM_SECONDS

    async def settled(self) -> None:
        """Returns once a worker is claimed, or has not come in time."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self.made.wait(), max(0.0, self._until - self._clock()))


async def _serve(
    config: ControlConfig,
    model_name: str,
    text_model: TextModel,
    sampling: SamplingParams,
    folder: Path,
) -> int:
    telemetry = Telemetry(
        __version__,
        methods=(*INFERENCE_METHODS, *CONTROL_METHODS),
        codes=CODES,
        reasons=REASONS,
        dropped_log_records=dropped_record_count,
    )
    readiness = SettableReadiness()
    rng = random.Random(config.seed) if config.seed is not None else random.SystemRandom()
    vocabulary = VocabularyCheck(text_model.tokenizer.token_count)
    names = NameCheck(model_name, served_name(config.model))

    first_claim = FirstClaim(time.monotonic)

    def on_readiness(ready: bool) -> None:
        readiness.set_serving(ready)
        if ready:
            first_claim.made.set()
        if ready and (model := fleet.served_model()) is not None:
            vocabulary.meet(model.vocabulary_size)
            names.meet(model.name)

    request_log = RequestLog()

    def on_call(end: CallEnd) -> None:
        telemetry.rpc_finished(end.method, end.code, end.reason, end.seconds)
        request_log.call_ended(end)

    async with AsyncExitStack() as stack:
        stack.callback(request_log.close)
        signals = stack.enter_context(StopSignals(watch_stdin=config.exit_with_parent))
        controller_id = f"{socket.gethostname()}:{os.getpid()}"
        fleet = Fleet(
            [],
            _replica_settings(config),
            clock=time.monotonic,
            jitter=random.Random().random,
            metrics=telemetry,
            on_readiness=on_readiness,
            served_model_name=model_name,
        )
        membership = Membership(
            fleet,
            lambda address: worker_at(address, controller_id=controller_id),
            config.replicas,
            _worker_lists(config),
            refresh_seconds=config.workers_refresh_seconds,
            ask=lambda address: place_at(address, controller_id=controller_id),
        )
        text = text_processor(config, text_model)
        stack.callback(text.close)
        text.prepare_chat()
        servicer = InferenceServicer(
            fleet,
            text,
            clock=time.monotonic,
            new_seed=lambda: rng.getrandbits(64),
            new_request_id=lambda: f"gen-{uuid.uuid4().hex}",
            workers=lambda: [serving_worker(replica) for replica in fleet.replicas],
            settled=first_claim.settled,
            default_sampling=sampling,
        )
        server = ControlServer(
            [inference_service(servicer)],
            readiness,
            StatusInterceptor(
                status_of,
                on_call,
                lambda: secrets.token_hex(8),
                max_message_bytes=MAX_REQUEST_BYTES,
                door=EngineDoor(fleet),
            ),
        )
        try:
            address = await server.start(config.host, config.port, _socket_path(config))
            stack.push_async_callback(server.stop, _STOP_GRACE_SECONDS)
            metrics_port = await _start_metrics(config, telemetry, fleet, stack)
            rollouts = open_rollouts(config, fleet, folder, stack)
            admin_address = await start_admin(config, rollouts, fleet, on_call, stack)
        except (CannotListen, StoreUnusable, OSError) as error:
            return _failed(str(error))
        _logger.info(
            "listening",
            extra=fields(
                address=address,
                metrics_port=metrics_port,
                admin=admin_address,
                model=model_name,
                worker=" ".join(config.replicas),
            ),
        )
        following = asyncio.create_task(membership.run())
        stack.push_async_callback(_cancelled, following)
        reconciling = asyncio.create_task(rollouts.run())
        stack.push_async_callback(_cancelled, reconciling)
        settle_collector()
        code = await run_until_stopped(
            fleet, servicer.finished, signals, config.drain_grace_seconds, reconciling
        )
    if code == 0:
        _logger.info("stopped", extra=fields(reason=signals.reason))
    return code


async def run_until_stopped(
    fleet: Fleet,
    finished: Callable[[], Awaitable[None]],
    signals: StopEvents,
    grace: float,
    beside: asyncio.Task[None] | None = None,
) -> int:
    """Runs the fleet; on the first signal drains it, on the second cuts the drain short.

    `finished` returns once no client waits for the rest of its answer. `beside` runs on its own;
    it only ends with a bug of ours, and that is the end of all. Returns the exit code.
    """
    running = asyncio.create_task(run_beside(fleet.run(), beside))
    stopping = asyncio.create_task(signals.first.wait())
    hurrying = asyncio.create_task(signals.second.wait())
    draining: asyncio.Task[None] | None = None
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            draining = asyncio.create_task(_drain(fleet, finished, grace))
            await asyncio.wait((running, draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            return 0
        error = running.exception()
        _logger.critical("the engine failed", exc_info=error)
        return _failed(f"failed: {type(error).__name__}: {error}".rstrip(": "))
    finally:
        tasks = [task for task in (running, stopping, hurrying, draining) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def _drain(fleet: Fleet, finished: Callable[[], Awaitable[None]], grace: float) -> None:
    """Lets requests run to their end, and clients that read slowly come to it, within `grace`."""
    deadline = asyncio.get_running_loop().time() + grace
    await fleet.drain(grace)
    try:
        async with asyncio.timeout_at(deadline):
            await finished()
    except TimeoutError:
        _logger.warning("clients outlived the drain")


async def _start_metrics(
    config: ControlConfig, telemetry: Telemetry, fleet: Fleet, stack: AsyncExitStack
) -> int | None:
    if config.metrics_port is None:
        return None
    server = MetricsServer(telemetry.render, lambda: fleet.ready)
    try:
        port = await server.start(config.metrics_host, config.metrics_port)
    except CannotServeMetrics as error:
        raise CannotListen(str(error)) from error
    stack.push_async_callback(server.close)
    return port


def refusal_of(config: ControlConfig) -> str | None:
    """Why `run` would refuse the model's files, None if it would not. `twinplane doctor` asks."""
    try:
        folder = resolve(config.model, weights=False)
        load_text_model(folder, trust_messages=config.trust_message_special_tokens)
        sampling_defaults(config, folder)
    except (ModelError, ModelFilesInvalid) as error:
        return str(error)
    return None


def text_processor(config: ControlConfig, model: TextModel) -> TextProcessor:
    """The text side of the model as the settings want it."""
    # As many as may run and wait: their texts never refuse whom the queue takes.
    max_pending = config.max_num_waiting + (config.max_num_seqs or _USUAL_ROWS)
    limits = TextLimits(thread_count=config.tokenizer_threads, max_pending=max_pending)
    renderer = None
    if model.template is not None:
        renderer = TemplatePool(model.template, limits.rendering, now=datetime.now)
    return TextProcessor(model, limits, renderer)


def _replica_settings(config: ControlConfig) -> ReplicaSettings:
    return ReplicaSettings(
        scheduling=SchedulingSettings(
            max_sequence_count=config.max_num_seqs,
            max_step_token_count=config.max_num_batched_tokens,
            max_sequence_token_count=config.max_model_len,
            max_waiting_count=config.max_num_waiting,
            async_scheduling=config.async_scheduling,
            enable_prefix_caching=config.enable_prefix_caching,
            ageing_seconds=config.ageing_seconds,
        ),
        claim=ClaimPolicy(loss_patience=config.worker_loss_patience),
        arithmetic_change=ArithmeticChange(config.arithmetic_change),
    )


def _worker_lists(config: ControlConfig) -> list[WorkerList]:
    lists: list[WorkerList] = []
    if config.workers_file is not None:
        lists.append(ListedInFile(Path(config.workers_file)))
    if config.workers_dns is not None:
        lists.append(ListedInDns(config.workers_dns))
    return lists


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Ends a task, whatever it does."""
    task.cancel()
    await asyncio.wait([task])


def _socket_path(config: ControlConfig) -> Path | None:
    return Path(config.uds).expanduser() if config.uds else None
