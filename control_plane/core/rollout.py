"""What a fleet's weights should be, and what to do next about it. Pure and level-based.

`decide` is given what is desired (a Rollout) and what is there (a view of each replica), and says
what to do now and what the rollout is afterwards. It remembers nothing: called again, after a loss
or a restart of either plane, it goes on from what it finds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import ceil

from control_plane.core.weights import (
    DiskSource,
    InFlightPolicy,
    Placement,
    Source,
    SpooledSource,
    WeightsUpdate,
)


class Strategy(Enum):
    """In which order replicas get other weights; see the contract's RolloutStrategy."""

    ROLLING = "rolling"
    ALL_AT_ONCE = "all-at-once"


class RolloutState(Enum):
    """Where a rollout is; see the contract's enum of this name."""

    RUNNING = "running"
    ROLLING_BACK = "rolling back"
    DONE = "done"
    ROLLED_BACK = "rolled back"
    FAILED = "failed"

    @property
    def is_over(self) -> bool:
        """Whether it has ended, one way or another."""
        return self not in (RolloutState.RUNNING, RolloutState.ROLLING_BACK)


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights that can be wanted.

    `digest`: of the version that they make; empty until a worker has prepared them. `source`: None
    where nobody knows. Partial ones are some tensors over those of `base`.
    """

    name: str = ""
    digest: str = ""
    source: Source | None = None
    base: Weights | None = None

    @property
    def is_partial(self) -> bool:
        """Whether they are only some tensors."""
        return self.base is not None


@dataclass(frozen=True, slots=True)
class Canary:
    """How many of a hundred replicas go first, and for how many seconds they are observed."""

    percent: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Rollout:
    """What is desired: `target`, or where it is turned back, `before`.

    `commits`: all were prepared, and have been told to exchange. `is_proven`: the canaries were
    observed for long enough. `reason`: why it was turned back or failed.
    """

    rollout_id: str
    target: Weights
    before: Weights
    strategy: Strategy = Strategy.ROLLING
    policy: InFlightPolicy = InFlightPolicy.FINISH_ON_OLD
    placement: Placement = Placement.AUTO
    canary: Canary | None = None
    state: RolloutState = RolloutState.RUNNING
    commits: bool = False
    is_proven: bool = False
    reason: str = ""

    @property
    def goal(self) -> Weights:
        """What every replica is to have."""
        is_back = self.state in (RolloutState.ROLLING_BACK, RolloutState.ROLLED_BACK)
        return self.before if is_back else self.target

    def turned_back(self, reason: str) -> Rollout:
        """The same, on its way back. What has not begun to turn keeps its reason."""
        if self.state is not RolloutState.RUNNING:
            return self
        return replace(self, state=RolloutState.ROLLING_BACK, reason=reason)

    def failed(self, reason: str) -> Rollout:
        """The same, given up."""
        words = f"{self.reason}; {reason}" if self.reason else reason
        return replace(self, state=RolloutState.FAILED, reason=words)


class Busy(Enum):
    """What a replica does at the moment."""

    NO = "no"
    PREPARING = "preparing"
    EXCHANGING = "exchanging"


@dataclass(frozen=True, slots=True)
class View:
    """A replica as it is now.

    `digest` and `prepared`, an update's id and digest, are of the worker that is there. `failure`:
    why it could not do what was asked last, for good; `failed_id`: of which update. `cools`: it
    failed a moment ago, and is to be asked again later. `fault_count` and `seconds` count since it
    has had the weights that it has.
    """

    number: int
    is_attached: bool = True
    digest: str = ""
    prepared: tuple[str, str] | None = None
    busy: Busy = Busy.NO
    failure: str = ""
    failed_id: str = ""
    cools: bool = False
    fault_count: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have a replica prepare weights."""

    number: int
    update: WeightsUpdate


@dataclass(frozen=True, slots=True)
class Commit:
    """Have a replica exchange its weights for prepared ones."""

    number: int
    update_id: str
    digest: str
    policy: InFlightPolicy


@dataclass(frozen=True, slots=True)
class Abort:
    """Have a replica drop what it has prepared."""

    number: int
    update_id: str


@dataclass(frozen=True, slots=True)
class CallOff:
    """Take back what a replica was asked for, unless that has begun to take effect."""

    number: int


Action = Prepare | Commit | Abort | CallOff


@dataclass(frozen=True, slots=True)
class Decision:
    """The rollout as it is now; what to do, once that is written down; and when to look again, at
    the latest: None for only when something has changed."""

    rollout: Rollout
    actions: tuple[Action, ...] = ()
    look_again: float | None = None

    @property
    def served(self) -> tuple[Weights, ...]:
        """The weights that may answer."""
        rollout = self.rollout
        if rollout.state in (RolloutState.DONE, RolloutState.ROLLED_BACK):
            return (rollout.goal,)
        return tuple(each for each in (rollout.before, rollout.target) if each.digest)


def decide(rollout: Rollout, views: Sequence[View]) -> Decision:
    """What to do now. Asked again after each change, it ends once all is as it should be."""
    if rollout.state is RolloutState.FAILED:
        return Decision(rollout, tuple(_cleared(rollout, views)))
    if rollout.state is RolloutState.RUNNING:
        rollout = _judged(rollout, views)
    if rollout.state is RolloutState.RUNNING:
        return _forward(rollout, views)
    if rollout.state is RolloutState.ROLLING_BACK:
        return _back(rollout, views)
    return _steady(rollout, views)


def step_to(goal: Weights, digest: str) -> Weights | None:
    """What a replica with weights of this digest is to prepare next on its way to `goal`: that, or
    what it is based on. None: nobody can bring it there."""
    step = goal
    while step.base is not None and step.base.digest != digest:
        step = step.base
    return step if isinstance(step.source, DiskSource | SpooledSource) else None


def update_id(rollout: Rollout, step: Weights) -> str:
    """The name of the update that brings these weights in this rollout."""
    if step == rollout.target:
        return rollout.rollout_id
    return f"{rollout.rollout_id}-{step.digest[:16]}"


def failure_of(rollout: Rollout, view: View) -> str:
    """Why a replica can't do the next step towards the goal, for good; empty: nothing is known."""
    step = step_to(rollout.goal, view.digest)
    is_next = step is not None and view.failed_id == update_id(rollout, step)
    return view.failure if is_next else ""


def unreachable(view: View, goal: Weights) -> str:
    """Why nobody can bring a replica to these weights, for people."""
    what = f"the weights {goal.name!r}" if goal.name else "the weights that workers started with"
    return f"nobody knows where replica {view.number} could get {what} from"


# --- judging ------------------------------------------------------------------------------------


def _judged(rollout: Rollout, views: Sequence[View]) -> Rollout:
    """With what replicas have told of the target: its digest, or what is wrong with it."""
    name = update_id(rollout, rollout.target)
    for view in views:
        if not view.is_attached:
            continue
        if view.prepared is not None and view.prepared[0] == name:
            digest = view.prepared[1]
            if not rollout.target.digest:
                rollout = replace(rollout, target=replace(rollout.target, digest=digest))
            elif digest != rollout.target.digest:
                return rollout.turned_back(
                    f"replica {view.number} has prepared weights of digest {digest[:12]}, not "
                    f"{rollout.target.digest[:12]}"
                )
        if failure := failure_of(rollout, view):
            return rollout.turned_back(f"replica {view.number}: {failure}")
        if view.fault_count and view.digest == rollout.target.digest != rollout.before.digest:
            return rollout.turned_back(
                f"replica {view.number} could not answer a request with the new weights"
            )
    return rollout


# --- the ways forward ---------------------------------------------------------------------------


def _forward(rollout: Rollout, views: Sequence[View]) -> Decision:
    here = [view for view in views if view.is_attached]
    pending = _pending(rollout, here)
    if not here:
        return Decision(rollout)
    if not pending and not any(view.busy is not Busy.NO for view in here):
        done = replace(rollout, state=RolloutState.DONE)
        if rollout.canary is None or rollout.is_proven:
            return Decision(done, tuple(_cleared(rollout, here)))
    match rollout.strategy:
        case Strategy.ROLLING:
            return _rolling(rollout, here, pending)
        case Strategy.ALL_AT_ONCE:
            return _all_at_once(rollout, pending)


def _rolling(rollout: Rollout, here: Sequence[View], pending: Sequence[View]) -> Decision:
    if rollout.canary is not None and not rollout.is_proven:
        first = max(1, ceil(len(here) * rollout.canary.percent / 100))
        observed = [view for view in here if view not in pending]
        if len(observed) >= first or not pending:
            left = rollout.canary.seconds - min(view.seconds for view in observed)
            if left > 0:
                return Decision(rollout, look_again=left)
            rollout = replace(rollout, is_proven=True)
            if not pending:
                return Decision(rollout, look_again=0.0)
    # Whoever is under way comes first: one at a time.
    active = [view for view in pending if view.busy is not Busy.NO or view.prepared is not None]
    view = (active or pending)[0] if pending else None
    if view is None:
        return Decision(rollout)
    return _bring(rollout, [view])


def _all_at_once(rollout: Rollout, pending: Sequence[View]) -> Decision:
    if not rollout.commits:
        name = update_id(rollout, rollout.target)
        ready = [view for view in pending if view.prepared and view.prepared[0] == name]
        if len(ready) < len(pending):
            return _bring(rollout, [view for view in pending if view not in ready])
        rollout = replace(rollout, commits=True)
    return _bring(rollout, pending)


def _back(rollout: Rollout, views: Sequence[View]) -> Decision:
    here = [view for view in views if view.is_attached]
    busy = [view for view in here if view.busy is not Busy.NO]
    pending = _pending(rollout, here)
    # What is under way to the new weights ends first, one way or another.
    going = [view for view in busy if view.digest == rollout.before.digest]
    off = tuple(CallOff(view.number) for view in going)
    for view in pending:
        if failure := failure_of(rollout, view):
            return Decision(
                rollout.failed(f"replica {view.number} can't be turned back: {failure}")
            )
    if not here or (not pending and going):
        return Decision(rollout, off)
    if not pending:
        over = replace(rollout, state=RolloutState.ROLLED_BACK)
        return Decision(over, tuple(_cleared(over, here)))
    brought = _bring(rollout, pending)
    return replace(brought, actions=(*off, *brought.actions))


def _steady(rollout: Rollout, views: Sequence[View]) -> Decision:
    """All is well; whoever comes late is brought to it."""
    here = [view for view in views if view.is_attached]
    reachable = [
        view
        for view in _pending(rollout, here)
        if not failure_of(rollout, view) and step_to(rollout.goal, view.digest) is not None
    ]
    brought = _bring(rollout, reachable)
    others = [view for view in here if view.digest == rollout.goal.digest]
    return replace(brought, actions=(*brought.actions, *_cleared(rollout, others)))


def _pending(rollout: Rollout, here: Sequence[View]) -> list[View]:
    return [view for view in here if view.digest != rollout.goal.digest or not view.digest]


def _bring(rollout: Rollout, views: Sequence[View]) -> Decision:
    """The next step of each of these towards the goal. Fails the rollout, or turns it back, where
    there is none."""
    actions: list[Action] = []
    for view in views:
        step = step_to(rollout.goal, view.digest)
        if step is None:
            reason = unreachable(view, rollout.goal)
            if rollout.state is RolloutState.RUNNING:
                return Decision(rollout.turned_back(reason), look_again=0.0)
            return Decision(rollout.failed(reason))
        if view.busy is not Busy.NO or view.cools:
            continue
        name = update_id(rollout, step)
        if view.prepared is None:
            assert step.source is not None
            update = WeightsUpdate(
                name, step.source, step.is_partial, rollout.placement, step.digest
            )
            actions.append(Prepare(view.number, update))
        elif view.prepared[0] != name or view.prepared[1] != (step.digest or view.prepared[1]):
            actions.append(Abort(view.number, view.prepared[0]))
        elif step is not rollout.goal or not _waits(rollout):
            actions.append(Commit(view.number, name, view.prepared[1], rollout.policy))
    return Decision(rollout, tuple(actions))


def _waits(rollout: Rollout) -> bool:
    """Whether who is prepared waits for others."""
    is_forward = rollout.state is RolloutState.RUNNING
    return is_forward and rollout.strategy is Strategy.ALL_AT_ONCE and not rollout.commits


def _cleared(rollout: Rollout, views: Sequence[View]) -> list[Action]:
    """What a rollout has prepared and nobody wants any more."""
    return [
        Abort(view.number, view.prepared[0])
        for view in views
        if view.is_attached and view.prepared is not None and view.busy is Busy.NO
    ]
