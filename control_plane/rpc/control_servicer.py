"""twinplane.control.v1.ControlService: what operators ask of the fleet's weights."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc

from control_plane.core.weights import InFlightPolicy
from control_plane.rpc.checker import Checker
from control_plane.rpc.control_convert import (
    check_policy,
    check_rollout,
    rollout_to_pb,
    state_to_pb,
)
from control_plane.rpc.errors import InvalidRequest
from control_plane.rpc.spooling import spool
from control_plane.shell.fleet_weights import FleetWeights
from control_plane.shell.ports import WorkerRefused
from control_plane.shell.rollouts import Order, RolloutConflict, Rollouts
from twinplane.control.v1 import control_pb2 as pb
from twinplane.control.v1 import control_pb2_grpc
from twinplane.errors import Violation
from twinplane.grpc.refused_streams import read_out

_Context = grpc.aio.ServicerContext[Any, Any]


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """The operators' RPCs. It needs StatusInterceptor in front of it."""

    def __init__(self, rollouts: Rollouts, weights: FleetWeights) -> None:
        self._rollouts = rollouts
        self._weights = weights

    async def UpdateWeights(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.UpdateWeightsRequest], context: _Context
    ) -> pb.UpdateWeightsResponse:
        """Begins a rollout, once all of a stream is here."""
        try:
            with self._rollouts.arriving() as path:
                order = await self._order(request_iterator, path)
                rollout = await self._rollouts.begin(order)
        except Exception:
            await read_out(request_iterator)
            raise
        return pb.UpdateWeightsResponse(rollout=rollout_to_pb(rollout))

    async def GetWeights(  # noqa: N802
        self, request: pb.GetWeightsRequest, context: _Context
    ) -> pb.GetWeightsResponse:
        """Says how all stands."""
        _known(request)
        return pb.GetWeightsResponse(state=state_to_pb(self._rollouts.look()))

    async def WatchWeights(  # noqa: N802
        self, request: pb.WatchWeightsRequest, context: _Context
    ) -> AsyncIterator[pb.WatchWeightsResponse]:
        """Says how all stands, until the rollout is over."""
        _known(request)
        status = self._rollouts.look()
        while True:
            yield pb.WatchWeightsResponse(state=state_to_pb(status))
            if status.rollout is None or status.rollout.state.is_over:
                return
            status = await self._rollouts.changed(status)

    async def RollbackWeights(  # noqa: N802
        self, request: pb.RollbackWeightsRequest, context: _Context
    ) -> pb.RollbackWeightsResponse:
        """Begins the way back."""
        _known(request)
        rollout = await self._rollouts.rollback()
        return pb.RollbackWeightsResponse(rollout=rollout_to_pb(rollout))

    async def AbortRollout(  # noqa: N802
        self, request: pb.AbortRolloutRequest, context: _Context
    ) -> pb.AbortRolloutResponse:
        """Turns the rollout back."""
        _known(request)
        rollout = await self._rollouts.abort(request.rollout_id)
        return pb.AbortRolloutResponse(rollout=rollout_to_pb(rollout))

    async def Pause(  # noqa: N802
        self, request: pb.PauseRequest, context: _Context
    ) -> pb.PauseResponse:
        """Pauses every replica."""
        checker = Checker()
        checker.known_fields(request)
        policy = check_policy(checker, request.in_flight, "in_flight")
        checker.raise_if_any()
        try:
            await self._weights.pause(policy or InFlightPolicy.KEEP_KV, refuses=request.refuse_new)
        except WorkerRefused as error:
            raise RolloutConflict(f"not all replicas pause: {error}") from error
        finally:
            self._rollouts.tell()
        return pb.PauseResponse()

    async def Resume(  # noqa: N802
        self, request: pb.ResumeRequest, context: _Context
    ) -> pb.ResumeResponse:
        """Goes on."""
        _known(request)
        self._weights.resume()
        self._rollouts.tell()
        return pb.ResumeResponse()

    async def _order(self, requests: AsyncIterator[pb.UpdateWeightsRequest], path: Path) -> Order:
        """What is asked for; of a stream, with its tensors in a file at `path`."""
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("message") != "rollout":
            raise InvalidRequest([Violation("message", "the first one must have the rollout")])
        _known(first)
        order = check_rollout(first.rollout)
        self._rollouts.check_free()
        if first.rollout.WhichOneof("source") == "stream":
            return replace(order, source=await spool(first.rollout.stream, requests, path))
        async for _ in requests:
            raise InvalidRequest([Violation("chunk", "only weights from a stream have chunks")])
        return order


def _known(request: Any) -> None:
    checker = Checker()
    checker.known_fields(request)
    checker.raise_if_any()
