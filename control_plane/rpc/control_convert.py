"""Operators' messages: checked, as values of the shell, and back."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from google.protobuf.duration_pb2 import Duration

from control_plane.core.rollout import Canary, Rollout, RolloutState, Strategy, Weights
from control_plane.core.weights import DiskSource, InFlightPolicy, Placement, SpooledSource
from control_plane.rpc.checker import Checker
from control_plane.shell.rollout_status import FleetStatus, ReplicaStatus
from control_plane.shell.rollouts import Order
from twinplane.control.v1 import control_pb2 as pb
from twinplane.worker.v1 import weights_pb2

MAX_NAME_CHARACTERS = 64
_MAX_PATH_BYTES = 4096
_DAY_SECONDS = 24 * 60 * 60
_CANARY_SECONDS = 60.0
_DIGEST = re.compile(r"[0-9a-f]{64}")

_STRATEGIES: Mapping[int, Strategy] = MappingProxyType(
    {
        pb.ROLLOUT_STRATEGY_UNSPECIFIED: Strategy.ROLLING,
        pb.ROLLOUT_STRATEGY_ROLLING: Strategy.ROLLING,
        pb.ROLLOUT_STRATEGY_ALL_AT_ONCE: Strategy.ALL_AT_ONCE,
    }
)
_POLICIES: Mapping[int, InFlightPolicy] = MappingProxyType(
    {
        pb.IN_FLIGHT_POLICY_FINISH_ON_OLD: InFlightPolicy.FINISH_ON_OLD,
        pb.IN_FLIGHT_POLICY_CONTINUE_ON_NEW: InFlightPolicy.CONTINUE_ON_NEW,
        pb.IN_FLIGHT_POLICY_KEEP_KV: InFlightPolicy.KEEP_KV,
        pb.IN_FLIGHT_POLICY_ABORT: InFlightPolicy.ABORT,
    }
)
_PLACEMENTS: Mapping[int, Placement] = MappingProxyType(
    {
        weights_pb2.WEIGHTS_PLACEMENT_UNSPECIFIED: Placement.AUTO,
        weights_pb2.WEIGHTS_PLACEMENT_BESIDE: Placement.BESIDE,
        weights_pb2.WEIGHTS_PLACEMENT_IN_PLACE: Placement.IN_PLACE,
    }
)


def check_rollout(message: pb.WeightsRollout, path: str = "rollout") -> Order:
    """What an operator asks for. Of a stream, the source is a place still to be filled: its path
    is empty. Raises InvalidRequest."""
    checker = Checker()
    checker.known_fields(message, f"{path}.")
    name = message.name
    checker.require(
        0 < len(name) <= MAX_NAME_CHARACTERS and name.isascii() and name.isprintable(),
        f"{path}.name",
        f"must have 1 to {MAX_NAME_CHARACTERS} printable ASCII characters",
    )
    kind = message.WhichOneof("source")
    checker.require(kind is not None, f"{path}.source", "one must be set")
    if kind == "disk":
        checker.known_fields(message.disk, f"{path}.disk.")
        size = len(message.disk.path.encode())
        checker.require(
            0 < size <= _MAX_PATH_BYTES and "\0" not in message.disk.path,
            f"{path}.disk.path",
            f"must be a path of 1 to {_MAX_PATH_BYTES} bytes",
        )
    for field, values in (
        ("strategy", _STRATEGIES),
        ("placement", _PLACEMENTS),
    ):
        checker.require(
            getattr(message, field) in values, f"{path}.{field}", "this value is not known here"
        )
    policy = check_policy(checker, message.in_flight, f"{path}.in_flight")
    checker.require(
        message.expected_digest == "" or bool(_DIGEST.fullmatch(message.expected_digest)),
        f"{path}.expected_digest",
        "must have 64 hexadecimal digits, lower case",
    )
    strategy = _STRATEGIES.get(message.strategy, Strategy.ROLLING)
    canary = _canary(checker, message, strategy, f"{path}.canary")
    checker.raise_if_any()
    return Order(
        name=name,
        source=DiskSource(message.disk.path) if kind == "disk" else SpooledSource(""),
        is_partial=message.is_partial,
        strategy=strategy,
        policy=policy or InFlightPolicy.FINISH_ON_OLD,
        placement=_PLACEMENTS[message.placement],
        expected_digest=message.expected_digest,
        canary=canary,
    )


def check_policy(checker: Checker, value: int, field: str) -> InFlightPolicy | None:
    """A policy; None where the message leaves it to the server."""
    is_known = value == pb.IN_FLIGHT_POLICY_UNSPECIFIED or value in _POLICIES
    checker.require(is_known, field, "this value is not known here")
    return _POLICIES.get(value)


def _canary(
    checker: Checker, message: pb.WeightsRollout, strategy: Strategy, path: str
) -> Canary | None:
    if not message.HasField("canary"):
        return None
    canary, seconds = message.canary, _CANARY_SECONDS
    checker.known_fields(canary, f"{path}.")
    checker.require(strategy is Strategy.ROLLING, path, "goes only with the strategy rolling")
    checker.require(1 <= canary.percent <= 99, f"{path}.percent", "must be 1 to 99")
    if canary.HasField("observation"):
        seconds = canary.observation.seconds + canary.observation.nanos / 1e9
        checker.require(
            0 <= seconds <= _DAY_SECONDS, f"{path}.observation", "must be 0 seconds to a day"
        )
    return Canary(canary.percent, seconds)


def state_to_pb(status: FleetStatus) -> pb.WeightsState:
    """How all stands."""
    state = pb.WeightsState(
        replicas=[_replica_to_pb(replica) for replica in status.replicas],
        is_paused=status.is_paused,
    )
    if status.rollout is not None:
        state.rollout.CopyFrom(rollout_to_pb(status.rollout))
    return state


def rollout_to_pb(rollout: Rollout) -> pb.Rollout:
    """A rollout as it stands."""
    message = pb.Rollout(
        rollout_id=rollout.rollout_id,
        state=state_name(rollout.state),
        reason=rollout.reason,
        target=_weights_to_pb(rollout.target),
        before=_weights_to_pb(rollout.before),
        strategy=f"ROLLOUT_STRATEGY_{rollout.strategy.name}",
        in_flight=f"IN_FLIGHT_POLICY_{rollout.policy.name}",
    )
    if rollout.canary is not None:
        whole, fraction = divmod(round(rollout.canary.seconds * 1e9), 10**9)
        message.canary.percent = rollout.canary.percent
        message.canary.observation.CopyFrom(Duration(seconds=whole, nanos=fraction))
    return message


def state_name(state: RolloutState) -> str:
    """A state as the contract names it."""
    return f"ROLLOUT_STATE_{state.name}"


def _weights_to_pb(weights: Weights) -> pb.Weights:
    source = weights.source
    return pb.Weights(
        name=weights.name,
        digest=weights.digest,
        path=source.path if isinstance(source, DiskSource) else "",
        is_partial=weights.is_partial,
    )


def _replica_to_pb(replica: ReplicaStatus) -> pb.ReplicaWeights:
    return pb.ReplicaWeights(
        replica=replica.number,
        address=replica.address,
        phase=f"REPLICA_PHASE_{replica.phase.name}",
        digest=replica.digest,
        name=replica.name,
        trouble=replica.trouble,
        is_paused=replica.is_paused,
    )
