"""The Worker port over gRPC: claims a worker and keeps its step pipeline.

Each claim opens a channel of its own, so that the backoff of a broken connection never delays the
next attempt. A failure becomes WorkerRefused if the worker gave a reason (an ErrorInfo detail), and
WorkerLost if not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from control_plane.core.plan import Message, StepResult, WeightVersion
from control_plane.core.weights import PreparedWeights, WeightsUpdate
from control_plane.rpc import adapters_client, convert, weights_client
from control_plane.rpc.addresses import rendezvous_address
from control_plane.shell.adapter_files import AdapterFiles
from control_plane.shell.ports import (
    Admit,
    Attachment,
    MemoryPool,
    RefusalReason,
    WorkerInfo,
    WorkerLost,
    WorkerRefused,
    WorkerUnusable,
)
from control_plane.shell.ranks import Claimed, Rendezvous
from twinplane.bounds import MAX_EPOCH
from twinplane.grpc.options import NO_PROXY, WORKER_CONNECTION_OPTIONS, Keepalive
from twinplane.grpc.status import Status, read, read_ended
from twinplane.inference.v1 import inference_pb2
from twinplane.worker.v1 import (
    info_pb2,
    model_runner_pb2,
    model_runner_pb2_grpc,
    weights_pb2,
)

CONTRACT_VERSION = 1

_MAX_DIGITS = 20
"""Of a 64-bit number."""

_CHANNEL_OPTIONS = (
    *WORKER_CONNECTION_OPTIONS,
    NO_PROXY,
    *Keepalive(idle_ms=10_000, answer_ms=5_000).options(),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
)

# Statuses without a reason that no connection causes by itself. gRPC makes the last three of what
# HTTP servers answer.
_ANSWERS_OF_OTHERS = (
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
_SIGNS_OF_NO_GRPC = ("Failed parsing HTTP/2", "http1.x server")
"""What gRPC says of peers that speak something else."""
_LOOK_SECONDS = 2.0
_LOAD_ADAPTER_SECONDS = 120.0
"""How long a worker may take to load an adapter, in a queue of others."""

_Execute = grpc.aio.StreamStreamCall[
    model_runner_pb2.ExecuteRequest, model_runner_pb2.ExecuteResponse
]


class GrpcWorker:
    """One worker behind `address`: host:port, or unix:PATH.

    `attach_timeout` seconds bound each unary call of a claim. `encode` makes a message of the
    contract. Used by one replica at a time.
    """

    def __init__(
        self,
        address: str,
        *,
        controller_id: str,
        attach_timeout: float = 10.0,
        encode: Callable[[Message], model_runner_pb2.ExecuteRequest] = convert.message_to_pb,
    ) -> None:
        self.address = address
        self._controller_id = controller_id
        self._attach_timeout = attach_timeout
        self._encode = encode
        self._last_epoch = 0
        self._channel: grpc.aio.Channel | None = None
        self._execute: _Execute | None = None

    async def attach(self, epoch: int | None = None, admit: Admit | None = None) -> Attachment:
        """Claims the worker, by default one epoch above every epoch seen, and opens Execute.

        Raises WorkerLost, WorkerRefused, e.g. with STALE_EPOCH, or WorkerUnusable, when no epoch is
        left, or when the worker executes plans only together with others.
        """
        await self.detach()
        if epoch is None or admit is not None:
            info = await self.look()
            if info.rank_count > 1:
                raise WorkerUnusable(
                    f"{self.address} is one of {info.rank_count} ranks, which must execute each "
                    "plan together: list the addresses of all as one worker, separated by commas, "
                    "or all of them in one list"
                )
            if admit is not None:
                admit(info)
            if epoch is None:
                epoch = max(info.epoch, self._last_epoch) + 1
        claimed = await self.claim(epoch, None)
        pool = await self.join(0.0)
        return Attachment(claimed.info, pool, claimed.previous_epoch)

    async def look(self) -> WorkerInfo:
        """Connects if necessary, and asks what the worker is."""
        channel, stub = self._connect()
        try:
            answer = await stub.GetWorkerInfo(
                model_runner_pb2.GetWorkerInfoRequest(), timeout=self._attach_timeout
            )
        except grpc.aio.AioRpcError as error:
            raise await self._no_claim(read(error), channel) from error
        info = convert.info_from_pb(answer.worker_info)
        address = rendezvous_address(info.rendezvous_address, self.address)
        return replace(info, rendezvous_address=address)

    async def claim(self, epoch: int, rendezvous: Rendezvous | None) -> Claimed:
        """Claims the worker, which then begins to meet its fellow ranks, if it has any."""
        if epoch > MAX_EPOCH:
            raise WorkerUnusable(
                "somebody has claimed the worker under its last epoch, so that no claim can "
                "follow: restart the worker"
            )
        channel, stub = self._connect()
        try:
            attached = await stub.Attach(
                model_runner_pb2.AttachRequest(
                    epoch=epoch,
                    controller_id=self._controller_id,
                    contract_versions=info_pb2.ContractVersionRange(
                        minimum=CONTRACT_VERSION, maximum=CONTRACT_VERSION
                    ),
                    rendezvous=None if rendezvous is None else convert.rendezvous_to_pb(rendezvous),
                ),
                timeout=self._attach_timeout,
            )
        except grpc.aio.AioRpcError as error:
            raise await self._no_claim(read(error), channel) from error
        self._last_epoch = epoch
        return Claimed(convert.info_from_pb(attached.worker_info), attached.previous_epoch)

    async def join(self, seconds: float) -> MemoryPool:
        """Waits until the worker has met its fellow ranks, for which it has so many seconds, and
        opens Execute."""
        channel, stub = self._connect()
        try:
            answer = await stub.GetMemoryPool(
                model_runner_pb2.GetMemoryPoolRequest(), timeout=self._attach_timeout + seconds
            )
        except grpc.aio.AioRpcError as error:
            raise await self._no_claim(read(error), channel) from error
        self._execute = stub.Execute()
        return convert.pool_from_pb(answer.memory_pool)

    async def send(self, message: Message) -> None:
        """Writes a message to the pipeline. Raises WorkerLost or WorkerRefused if it has ended."""
        call = self._pipeline()
        try:
            request = self._encode(message)
        except ValueError as error:  # a number that its field can't hold, which is a bug of ours
            rows = convert.unsendable_rows(message)
            reason = RefusalReason.INVALID_PLAN
            raise WorkerRefused(reason, f"not sent: {error}", message.step_id, rows) from error
        try:
            await call.write(request)
        except asyncio.InvalidStateError as error:  # the call has ended; its status says why
            raise await _ended(call) from error
        except grpc.aio.AioRpcError as error:
            raise _translate(read(error)) from error

    async def receive(self) -> StepResult:
        """Reads the next result. Raises WorkerLost or WorkerRefused when the pipeline ends."""
        call = self._pipeline()
        try:
            response = await call.read()
        except asyncio.InvalidStateError as error:
            raise await _ended(call) from error
        except grpc.aio.AioRpcError as error:
            raise _translate(read(error)) from error
        if not isinstance(response, model_runner_pb2.ExecuteResponse):  # the end of the stream
            raise await _ended(call)
        return convert.answer_from_pb(response)

    async def ping(self) -> None:
        """Asks for the worker's health. Any answer is a sign of life, an error of its own too.

        Raises WorkerLost when the connection is broken.
        """
        if self._channel is None:
            raise WorkerLost("not attached")
        stub = health_pb2_grpc.HealthStub(self._channel)
        try:
            await stub.Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                raise WorkerLost("UNAVAILABLE") from error

    async def prepare(self, update: WeightsUpdate) -> PreparedWeights:
        """Sends an update, and waits until the worker has read and checked it."""
        _, stub = self._claimed()
        try:
            return await weights_client.prepare(stub, self._last_epoch, update)
        except weights_client.SpoolUnusable as error:
            raise WorkerRefused(RefusalReason.INVALID_UPDATE, str(error)) from error
        except grpc.aio.AioRpcError as error:
            raise _translate(read(error)) from error

    async def commit(self, update_id: str, digest: str) -> WeightVersion:
        """Makes prepared weights live. In place that may take as long as a load."""
        _, stub = self._claimed()
        request = weights_pb2.CommitWeightsRequest(
            epoch=self._last_epoch, update_id=update_id, digest=digest
        )
        try:
            version = (await stub.CommitWeights(request)).weight_version
        except grpc.aio.AioRpcError as error:
            raise _translate(read(error)) from error
        return WeightVersion(version.generation, version.digest)

    async def abort(self, update_id: str) -> None:
        """Drops what is prepared, or ends its preparation."""
        _, stub = self._claimed()
        request = weights_pb2.AbortWeightsRequest(epoch=self._last_epoch, update_id=update_id)
        try:
            await stub.AbortWeights(request, timeout=self._attach_timeout)
        except grpc.aio.AioRpcError as error:
            raise _translate(read(error)) from error

    async def load_adapter(self, slot: int, files: AdapterFiles) -> None:
        """Streams an adapter into a slot."""
        _, stub = self._claimed()
        try:
            await adapters_client.load(stub, self._last_epoch, slot, files, _LOAD_ADAPTER_SECONDS)
        except weights_client.SpoolUnusable as error:
            raise WorkerRefused(RefusalReason.INVALID_UPDATE, str(error)) from error
        except grpc.aio.AioRpcError as error:
            raise _translate(read(error)) from error

    async def list_adapters(self) -> dict[int, str]:
        """The digests of what the slots hold, by slot."""
        _, stub = self._claimed()
        try:
            return await adapters_client.held(stub, self._attach_timeout)
        except grpc.aio.AioRpcError as error:
            raise _translate(read(error)) from error

    async def detach(self) -> None:
        """Closes the pipeline and the connection. Idempotent; never raises."""
        call, self._execute = self._execute, None
        channel, self._channel = self._channel, None
        if call is not None:
            call.cancel()
        if channel is not None:
            await channel.close()

    async def _no_claim(
        self, status: Status, channel: grpc.aio.Channel
    ) -> WorkerLost | WorkerRefused | WorkerUnusable:
        """Why an attempt to claim the worker has failed. A worker has these RPCs, and gives its
        reasons; what answers otherwise is something else, and waiting does not make it a worker.
        """
        if status.reason and status.code is not grpc.StatusCode.UNIMPLEMENTED:
            return _translate(status)
        said = f"{status.code.name}: {status.message}"
        if status.code in _ANSWERS_OF_OTHERS:
            kind = "a control plane" if await _is_control_plane(channel) else "another service"
            return WorkerUnusable(f"{self.address} is {kind}, not a worker ({said})")
        if any(sign in status.message for sign in _SIGNS_OF_NO_GRPC):
            return WorkerUnusable(
                f"{self.address} is not a worker: what listens there does not speak gRPC ({said})"
            )
        return WorkerLost(f"no worker answers at {self.address} ({said})")

    def _connect(self) -> tuple[grpc.aio.Channel, Any]:
        """The channel of this claim or attempt, and the worker's methods on it."""
        if self._channel is None:
            self._channel = grpc.aio.insecure_channel(self.address, options=_CHANNEL_OPTIONS)
        return self._channel, model_runner_pb2_grpc.ModelRunnerServiceStub(self._channel)

    def _claimed(self) -> tuple[grpc.aio.Channel, Any]:
        """The channel of the claim, and the worker's methods on it. Raises WorkerLost."""
        self._pipeline()
        return self._connect()

    def _pipeline(self) -> _Execute:
        if self._execute is None:
            raise WorkerLost("not attached")
        return self._execute


async def _is_control_plane(channel: grpc.aio.Channel) -> bool:
    """Whether the server there knows the clients' service."""
    service = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_LOOK_SECONDS)
    except grpc.aio.AioRpcError:
        return False
    return True


def _translate(status: Status) -> WorkerLost | WorkerRefused:
    """A status with a reason comes from the worker; one without is the connection's."""
    if not status.reason:
        return WorkerLost(f"{status.code.name}: {status.message}")
    reason = RefusalReason(status.reason)
    known = reason is not RefusalReason.UNKNOWN
    message = status.message if known else f"{status.reason}: {status.message}"
    step_ids = _numbers(status.metadata.get("step_id", ""))
    rows = _numbers(status.metadata.get("rows", ""))
    return WorkerRefused(reason, message, step_ids[0] if step_ids else 0, rows)


def _numbers(text: str) -> list[int]:
    """Comma-separated numbers; none where any of them is something else."""
    parts = text.split(",")
    return [int(part) for part in parts] if all(map(_is_number, parts)) else []


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS


async def _ended(call: Any) -> WorkerLost | WorkerRefused:
    """Why a pipeline has ended, as an error."""
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return WorkerLost("the worker closed the pipeline")
    return _translate(read_ended(code, await call.details(), await call.trailing_metadata()))
