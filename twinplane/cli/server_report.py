"""What a running server tells about itself, of either plane, as far as the contract says it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from twinplane.client.failures import error_of
from twinplane.client.retry import RetryPolicy
from twinplane.client.sync import Client
from twinplane.errors import ModelNotFound, TwinplaneError, Unavailable
from twinplane.grpc.options import NO_PROXY
from twinplane.grpc.status import read
from twinplane.paths import expand_address
from twinplane.worker.v1 import info_pb2, model_runner_pb2, model_runner_pb2_grpc

_CONTROL, _WORKER = "control plane", "worker"
_LOST = "its worker was lost a moment ago, or it shuts down: requests wait or are refused"


class _Service(Enum):
    """How a control plane is told from a worker: by the service that it knows the health of."""

    CONTROL = "twinplane.inference.v1.InferenceService"
    WORKER = "twinplane.worker.v1.ModelRunnerService"


@dataclass(frozen=True, slots=True)
class ReportedModel:
    """A model that is served. `supports_chat` is None where a worker answers: it has no text."""

    name: str
    max_sequence_token_count: int
    vocabulary_size: int
    supports_chat: bool | None
    weight_generation: int
    weight_digest: str


@dataclass(frozen=True, slots=True)
class Report:
    """`plane` is "control plane" or "worker"; `reason` says why it is not ready.

    `facts` are pairs of a word and a text, in the order in which they are to be read.
    """

    address: str
    plane: str
    ready: bool
    reason: str
    facts: tuple[tuple[str, str], ...]
    models: tuple[ReportedModel, ...]

    def as_json(self) -> dict[str, object]:
        """The report for machines."""
        return {
            "address": self.address,
            "plane": self.plane,
            "ready": self.ready,
            "reason": self.reason,
            **{subject.replace(" ", "_"): text for subject, text in self.facts},
            "models": [asdict(model) for model in self.models],
        }


def fetch(address: str, timeout: float) -> Report:
    """Asks the server; `timeout` in seconds bounds each of its answers.

    Raises a TwinplaneError where there is no server, or one that is neither plane.
    """
    target = expand_address(address)
    with grpc.insecure_channel(target, (NO_PROXY,)) as channel:
        try:
            ready = _health(channel, _Service.CONTROL, timeout)
            if ready is not None:
                return _control(address, ready, timeout)
            ready = _health(channel, _Service.WORKER, timeout)
        except grpc.RpcError as failure:
            raise error_of(failure) from failure
        if ready is None:
            raise Unavailable(
                f"the server at {address} is no part of Twinplane", reason="NOT_TWINPLANE"
            )
        return _worker(channel, address, ready, timeout)


def _health(channel: grpc.Channel, service: _Service, timeout: float) -> bool | None:
    """Whether the service takes requests; None where the server has none of that name.

    Raises grpc.RpcError.
    """
    request = health_pb2.HealthCheckRequest(service=service.value)
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
    except grpc.RpcError as failure:
        if read(failure).code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
            return None
        raise
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _control(address: str, ready: bool, timeout: float) -> Report:
    with Client(address, timeout=timeout, retry=RetryPolicy(max_attempts=1)) as client:
        served = client.list_models()
        reason = "" if ready else _refusal(client) or _LOST
    models = tuple(
        ReportedModel(
            model.name,
            model.max_sequence_token_count,
            model.vocabulary_size,
            model.supports_chat,
            model.weight_version.generation,
            model.weight_version.digest,
        )
        for model in served
    )
    # To be ready is to have a worker.
    facts = (("worker", "attached"),) if ready else ()
    return Report(address, _CONTROL, ready, reason, facts, models)


def _refusal(client: Client) -> str:
    """What a request hears now, in the server's own words; empty where one would be taken."""
    try:
        client.tokenize("a")
    except (Unavailable, ModelNotFound) as error:
        return _line(error)
    except TwinplaneError:
        pass
    return ""


def _worker(channel: grpc.Channel, address: str, ready: bool, timeout: float) -> Report:
    stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
    try:
        response = stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest(), timeout=timeout)
    except grpc.RpcError as failure:
        error = error_of(failure)
        if not isinstance(error, Unavailable) or not error.reason:
            raise error from failure
        return Report(address, _WORKER, False, _line(error), (), ())
    info: info_pb2.WorkerInfo = response.worker_info
    facts = (
        ("worker id", info.worker_id),
        ("device", info.device.name),
        ("executor", info.executor),
        ("controller", f"epoch {info.epoch}" if info.epoch else "none yet"),
    )
    model = ReportedModel(
        info.model.name,
        info.limits.max_sequence_token_count,
        info.model.vocabulary_size,
        None,
        info.weight_version.generation,
        info.weight_version.digest,
    )
    reason = "" if ready else "it loads, stops, or can't go on: see its log"
    return Report(address, _WORKER, ready, reason, facts, (model,))


def _line(error: TwinplaneError) -> str:
    return " ".join(str(error).split())
