"""Follows a rollout to its end, and says on standard error what happens."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import grpc

from twinplane.grpc.status import read

_AWAY_SECONDS = 60.0
"""A control plane that restarts meanwhile goes on with the rollout: so long it is waited for."""
_LOOK_SECONDS = 0.5


class _Shown(Protocol):
    """Where the sum of it is shown."""

    def update(self, status: str) -> None:
        """Replaces what is shown."""
        ...


class _Nowhere:
    """Where there is no terminal, or no rich, lines are enough."""

    def update(self, status: str) -> None:
        """See _Shown."""


def watch(stub: Any, rollout_id: str) -> Any:
    """The rollout when it is over, told on the way. Raises RpcError."""
    from twinplane.control.v1 import control_pb2 as pb

    phases: dict[int, int] = {}
    last: Any = None
    until = time.monotonic() + _AWAY_SECONDS
    with _spinner() as shown:
        while True:
            try:
                for message in stub.WatchWeights(pb.WatchWeightsRequest()):
                    until = time.monotonic() + _AWAY_SECONDS
                    state = message.state
                    if not state.HasField("rollout") or state.rollout.rollout_id != rollout_id:
                        # Another one has taken its place, or the server has forgotten it.
                        return last
                    last = state.rollout
                    _tell(state, phases)
                    shown.update(_sum(state))
                return last
            except grpc.RpcError as error:
                if read(error).reason or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                if time.monotonic() > until:
                    raise
                shown.update("the control plane does not answer; the rollout goes on with it")
                time.sleep(_LOOK_SECONDS)


def is_done(rollout: Any, wanted: Any = None) -> bool:
    """Whether it ended as it was to: done, or in the state that is `wanted`."""
    from twinplane.control.v1 import control_pb2 as pb

    return rollout is not None and rollout.state == (wanted or pb.ROLLOUT_STATE_DONE)


def state_word(state: int) -> str:
    """A rollout's state in plain words."""
    from twinplane.control.v1 import control_pb2 as pb

    name: str = pb.RolloutState.Name(state)
    return name.removeprefix("ROLLOUT_STATE_").lower().replace("_", " ")


def words_of(rollout: Any) -> str:
    """How it ended, in a line."""
    if rollout is None:
        return "another rollout has taken its place; see twinplane weights status"
    name = rollout.target.name or "the weights of the start"
    why = f": {rollout.reason}" if rollout.reason else ""
    return f"{name}: {state_word(rollout.state)}{why}"


def _tell(state: Any, phases: dict[int, int]) -> None:
    from twinplane.cli.weights import phase_word

    for replica in state.replicas:
        if phases.get(replica.replica) != replica.phase:
            phases[replica.replica] = replica.phase
            trouble = f": {replica.trouble}" if replica.trouble else ""
            print(f"replica {replica.replica}: {phase_word(replica)}{trouble}", file=sys.stderr)


def _sum(state: Any) -> str:
    from twinplane.control.v1 import control_pb2 as pb

    current = sum(each.phase == pb.REPLICA_PHASE_CURRENT for each in state.replicas)
    word = state_word(state.rollout.state)
    return f"{word}: {current} of {len(state.replicas)} replicas have what is wanted"


@contextmanager
def _spinner() -> Iterator[_Shown]:
    try:
        from rich.console import Console
    except ModuleNotFoundError:  # the base install is the client's
        yield _Nowhere()
        return
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Nowhere()
        return
    with console.status("") as status:
        yield status
