"""How a fleet stands with its weights, for operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from control_plane.core.rollout import (
    Busy,
    Rollout,
    View,
    failure_of,
    step_to,
    unreachable,
    update_id,
)
from control_plane.shell.fleet import Fleet
from control_plane.shell.replica import Replica


class Phase(Enum):
    """What a replica does for the rollout; the values are the contract's names in lower case."""

    CURRENT = "current"
    WAITING = "waiting"
    PREPARING = "preparing"
    PREPARED = "prepared"
    EXCHANGING = "exchanging"
    AWAY = "away"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica; see the contract's ReplicaWeights."""

    number: int
    address: str
    phase: Phase
    digest: str = ""
    name: str = ""
    trouble: str = ""
    is_paused: bool = False


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """What is desired and what is there."""

    rollout: Rollout | None
    replicas: tuple[ReplicaStatus, ...]
    is_paused: bool = False


def status_of_fleet(rollout: Rollout | None, fleet: Fleet, views: Sequence[View]) -> FleetStatus:
    """All as it is now."""
    by_number = {replica.number: replica for replica in fleet.replicas}
    replicas = tuple(
        _status(rollout, by_number[view.number], view) for view in views if view.number in by_number
    )
    return FleetStatus(rollout, replicas, fleet.weights.served.is_paused)


def _status(rollout: Rollout | None, replica: Replica, view: View) -> ReplicaStatus:
    observed = replica.weights.observed()
    version = observed.version
    phase, trouble = _phase(rollout, view)
    return ReplicaStatus(
        view.number,
        replica.life.address,
        phase,
        "" if version is None else version.digest,
        "" if version is None else version.name,
        trouble or observed.trouble,
        observed.is_paused,
    )


def _phase(rollout: Rollout | None, view: View) -> tuple[Phase, str]:
    """What it does, and what is wrong with it."""
    if not view.is_attached:
        return Phase.AWAY, ""
    if rollout is None:
        return Phase.CURRENT, ""
    goal = rollout.goal
    if goal.digest and view.digest == goal.digest:
        return Phase.CURRENT, ""
    if view.busy is Busy.EXCHANGING:
        return Phase.EXCHANGING, ""
    if view.busy is Busy.PREPARING:
        return Phase.PREPARING, ""
    if failure := failure_of(rollout, view):
        return Phase.FAILED, failure
    step = step_to(goal, view.digest)
    if step is None:
        return Phase.FAILED, unreachable(view, goal)
    if view.prepared is not None and view.prepared[0] == update_id(rollout, step):
        return Phase.PREPARED, ""
    return Phase.WAITING, ""
