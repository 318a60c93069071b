"""What a running server tells about itself, of either plane, as far as the contract says it."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import grpc
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from twinplane.cli.connection import Connection
from twinplane.client import health
from twinplane.client.channel import OPTIONS
from twinplane.client.endpoint import Endpoint, checked_address
from twinplane.client.failures import Failures
from twinplane.client.sync import Client
from twinplane.client.values import Health, SamplingDefaults, ServingWorker, WorkerState
from twinplane.errors import TwinplaneError, Unavailable, WrongServer
from twinplane.worker.v1 import info_pb2, model_runner_pb2, model_runner_pb2_grpc

_CONTROL, _WORKER = "control plane", "worker"


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """A model that is served. Where a worker answers, `supports_chat` and `default_sampling` are
    None: text and defaults are its control plane's.
    """

    name: str
    max_sequence_token_count: int
    vocabulary_size: int
    supports_chat: bool | None
    weight_generation: int
    weight_digest: str
    default_sampling: SamplingDefaults | None


@dataclass(frozen=True, slots=True)
class Report:
    """`plane` is "control plane" or "worker"; `reason` says why it is not ready.

    `workers` are a control plane's. `facts` are a worker's own, pairs of a word and what is said
    of it, in the order in which they are to be read.
    """

    address: str
    plane: str
    ready: bool
    reason: str
    facts: tuple[tuple[str, str | int], ...]
    models: tuple[ReportedModel, ...]
    workers: tuple[ServingWorker, ...] = ()

    def as_json(self) -> dict[str, object]:
        """The report for machines."""
        return {
            "address": self.address,
            "plane": self.plane,
            "ready": self.ready,
            "reason": self.reason,
            **{subject.replace(" ", "_"): text for subject, text in self.facts},
            "workers": [_plain(worker) for worker in self.workers],
            "models": [asdict(model) for model in self.models],
        }


def _plain(worker: ServingWorker) -> dict[str, object]:
    states = {"state": worker.state.value, "replica_state": worker.replica_state.value}
    return {**asdict(worker), **states}


def fetch(connection: Connection, timeout: float) -> Report:
    """Asks the server; `timeout` in seconds bounds each of its answers.

    Raises a TwinplaneError where there is no server, or one that is neither plane.
    """
    with connection.client() as client:
        try:
            return _control(client, connection.address, timeout)
        except WrongServer as error:
            if connection.is_secure:  # no worker speaks TLS
                raise
            return _worker(checked_address(connection.address), timeout, error)


def _control(client: Client, address: str, timeout: float) -> Report:
    ready = client.health(timeout=timeout) is Health.SERVING
    served = client.list_models(timeout=timeout)
    workers = client.list_workers(timeout=timeout)
    models = tuple(
        ReportedModel(
            model.name,
            model.max_sequence_token_count,
            model.vocabulary_size,
            model.supports_chat,
            model.weight_version.generation,
            model.weight_version.digest,
            model.default_sampling,
        )
        for model in served
    )
    reason = "" if ready else _reason(workers, can_queue=bool(models))
    return Report(address, _CONTROL, ready, reason, (), models, workers)


def _reason(workers: tuple[ServingWorker, ...], *, can_queue: bool) -> str:
    """Why a control plane with these workers is not ready."""
    if any(worker.state is WorkerState.ATTACHED for worker in workers):
        return "it shuts down: it finishes what runs and refuses new requests"
    away = [worker.away_seconds for worker in workers if worker.away_seconds is not None]
    if not away:
        return "no worker has come yet: requests are refused until one does"
    outcome = "wait for it" if can_queue else "are refused until it is back"
    return f"its worker has been away for {max(1, round(min(away)))} s: requests {outcome}"


def _worker(address: str, timeout: float, wrong: WrongServer) -> Report:
    """The report of a worker. Raises `wrong` for a server that is none either."""
    with grpc.insecure_channel(address, OPTIONS) as channel:
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        check = channel.unary_unary(health.CHECK, health.serialize, health.parse)
        try:
            answer: Int32Value = check(StringValue(), timeout=timeout)
            response = stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest(), timeout=timeout)
            memory = stub.GetMemoryPool(model_runner_pb2.GetMemoryPoolRequest(), timeout=timeout)
        except grpc.RpcError as failure:
            error = Failures(Endpoint(address, is_secure=False)).error_of(failure, timeout)
            if not isinstance(error, Unavailable):
                raise wrong from failure
            return Report(address, _WORKER, False, _line(error), (), ())
    ready = health.health_of(answer) is Health.SERVING
    info: info_pb2.WorkerInfo = response.worker_info
    pool: info_pb2.MemoryPool = memory.memory_pool
    facts = (
        ("worker id", info.worker_id),
        ("device", info.device.name),
        ("executor", info.executor),
        ("controller", f"epoch {info.epoch}" if info.epoch else "none yet"),
        ("kv token count", max(0, pool.block_count - 1) * pool.block_token_count),
        ("free kv token count", pool.free_block_count * pool.block_token_count),
        ("max sequence count", info.limits.max_sequence_count),
    )
    model = ReportedModel(
        info.model.name,
        info.limits.max_sequence_token_count,
        info.model.vocabulary_size,
        None,
        info.weight_version.generation,
        info.weight_version.digest,
        None,
    )
    reason = "" if ready else "it loads, stops, or can't go on: see its log"
    return Report(address, _WORKER, ready, reason, facts, (model,))


def _line(error: TwinplaneError) -> str:
    return " ".join(str(error).split())
