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
from twinplane.client.values import Health
from twinplane.errors import ModelNotFound, TwinplaneError, Unavailable, WrongServer
from twinplane.worker.v1 import info_pb2, model_runner_pb2, model_runner_pb2_grpc

_CONTROL, _WORKER = "control plane", "worker"
_LOST = "its worker was lost a moment ago, or it shuts down: requests wait or are refused"


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
    reason = "" if ready else _refusal(client, timeout) or _LOST
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


def _refusal(client: Client, timeout: float) -> str:
    """What a request hears now, in the server's own words; empty where one would be taken."""
    try:
        client.tokenize("a", timeout=timeout)
    except (Unavailable, ModelNotFound) as error:
        return _line(error)
    except TwinplaneError:
        pass
    return ""


def _worker(address: str, timeout: float, wrong: WrongServer) -> Report:
    """The report of a worker. Raises `wrong` for a server that is none either."""
    with grpc.insecure_channel(address, OPTIONS) as channel:
        stub = model_runner_pb2_grpc.ModelRunnerServiceStub(channel)
        check = channel.unary_unary(health.CHECK, health.serialize, health.parse)
        try:
            answer: Int32Value = check(StringValue(), timeout=timeout)
            response = stub.GetWorkerInfo(model_runner_pb2.GetWorkerInfoRequest(), timeout=timeout)
        except grpc.RpcError as failure:
            error = Failures(Endpoint(address, is_secure=False)).error_of(failure, timeout)
            if not isinstance(error, Unavailable):
                raise wrong from failure
            return Report(address, _WORKER, False, _line(error), (), ())
    ready = health.health_of(answer) is Health.SERVING
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
