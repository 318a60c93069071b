"""Rollouts over fleets that lose workers, refuse and restart at any point: none gets stuck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.core.rollout import (
    Abort,
    Action,
    Busy,
    CallOff,
    Canary,
    Commit,
    Decision,
    Prepare,
    Rollout,
    RolloutState,
    Strategy,
    View,
    Weights,
    decide,
)
from control_plane.core.weights import DiskSource
from tests.support.quick import examples

FIRST = "first"


def digest_of(path: str) -> str:
    return sha256(path.encode()).hexdigest()


@dataclass(slots=True, eq=False)
class Machine:
    """A worker and what its replica does. A new life of it has `first` weights."""

    number: int
    first: str
    digest: str = ""
    is_attached: bool = True
    prepared: tuple[str, str] | None = None
    action: Action | None = None
    failure: str = ""
    failed_id: str = ""
    fault_count: int = 0

    def view(self) -> View:
        busy = Busy.NO
        if self.action is not None:
            busy = Busy.EXCHANGING if isinstance(self.action, Commit) else Busy.PREPARING
        if not self.is_attached:
            return View(self.number, is_attached=False, busy=busy)
        return View(
            self.number,
            digest=self.digest,
            prepared=self.prepared,
            busy=busy,
            failure=self.failure,
            failed_id=self.failed_id,
            fault_count=self.fault_count,
            seconds=10.0,
        )

    def finish(self) -> None:
        """What it was asked for takes effect."""
        match self.action:
            case Prepare(update=update):
                assert self.prepared is None and isinstance(update.source, DiskSource)
                digest = digest_of(update.source.path)
                if update.expected_digest not in ("", digest):
                    self.refuse()
                else:
                    self.prepared = (update.update_id, digest)
            case Commit(update_id=update_id, digest=digest):
                assert self.prepared == (update_id, digest)
                self.digest, self.prepared, self.fault_count = digest, None, 0
            case Abort():
                self.prepared = None
            case _:
                pass
        self.action = None

    def refuse(self) -> None:
        match self.action:
            case Prepare(update=update):
                self.failure, self.failed_id = "refused", update.update_id
            case Commit(update_id=update_id):
                self.failure, self.failed_id = "refused", update_id
            case _:
                pass
        self.action = None

    def lose(self, *, dies: bool, behind: bool) -> None:
        """`behind`: what it was asked for has taken effect before."""
        if behind and self.is_attached and isinstance(self.action, Commit):
            self.finish()
        self.action, self.is_attached = None, False
        if dies:
            self.digest, self.prepared = self.first, None
            self.failure = self.failed_id = ""
            self.fault_count = 0


@dataclass(slots=True, eq=False)
class World:
    rollout: Rollout
    machines: list[Machine] = field(default_factory=list)

    def look(self) -> Decision:
        views = [machine.view() for machine in self.machines]
        decision = decide(self.rollout, views)
        if self.rollout.state.is_over:
            assert decision.rollout == self.rollout
        self.check(decision, views)
        self.rollout = decision.rollout
        for action in decision.actions:
            machine = self.machines[action.number]
            assert machine.is_attached
            if isinstance(action, CallOff):
                machine.action = None
            elif machine.action is None:
                machine.action = action
        return decision

    def check(self, decision: Decision, views: Sequence[View]) -> None:
        rollout = decision.rollout
        served = {weights.digest for weights in decision.served}
        goal = rollout.goal
        for action in decision.actions:
            if isinstance(action, Commit) and action.update_id in (rollout.rollout_id, goal.digest):
                assert action.digest in served
            if isinstance(action, Commit) and goal.digest == action.digest:
                assert action.digest in served
        if rollout.state is not RolloutState.RUNNING:
            return
        starts = {each.number for each in decision.actions}
        busy = {view.number for view in views if view.busy is not Busy.NO and view.is_attached}
        if rollout.strategy is Strategy.ROLLING:
            assert len(starts) <= 1
        elif not rollout.commits:
            assert not [
                each
                for each in decision.actions
                if isinstance(each, Commit) and each.update_id == rollout.rollout_id
            ]
        assert not starts & busy

    def settle(self) -> None:
        """From now on everybody is there, and nothing goes wrong any more."""
        for machine in self.machines:
            machine.is_attached, machine.fault_count = True, 0
        for _ in range(20 * len(self.machines) + 20):
            before = self.rollout
            decision = self.look()
            idle = not any(machine.action for machine in self.machines)
            if idle and not decision.actions and self.rollout == before:
                return
            for machine in self.machines:
                machine.finish()
        raise AssertionError(f"it never ends: {self.rollout}")


CHAIN = Weights("base", digest_of("/base"), DiskSource("/base"))
BEFORE = (
    Weights(digest=FIRST),
    Weights("a", digest_of("/a"), DiskSource("/a")),
    Weights("part", digest_of("/part"), DiskSource("/part"), CHAIN),
)
EVENTS = ("look", "finish", "refuse", "lose", "behind", "die", "attach", "fault", "restart", "join")


@st.composite
def worlds(draw: st.DrawFn) -> World:
    before = draw(st.sampled_from(BEFORE))
    is_partial = draw(st.booleans())
    base = before if is_partial else None
    expected = draw(st.sampled_from(("", "", digest_of("/new"), "f" * 64)))
    canary = draw(st.sampled_from((None, Canary(30, 5.0))))
    strategy = draw(st.sampled_from(Strategy))
    if strategy is Strategy.ALL_AT_ONCE:
        canary = None
    target = Weights("new", expected, DiskSource("/new"), base)
    world = World(Rollout("r", target, before, strategy, canary=canary))
    for number in range(draw(st.integers(1, 4))):
        world.machines.append(Machine(number, FIRST, before.digest))
    return world


def happen(world: World, event: str, which: int) -> None:
    machine = world.machines[which % len(world.machines)]
    match event:
        case "look":
            world.look()
        case "finish":
            machine.finish()
        case "refuse":
            machine.refuse()
        case "lose" | "behind" | "die":
            machine.lose(dies=event == "die", behind=event == "behind")
        case "attach":
            machine.is_attached = True
        case "fault":
            machine.fault_count += machine.is_attached
        case "restart":
            for each in world.machines:
                each.action = None
                each.failure = each.failed_id = ""
        case _ if len(world.machines) < 6:
            world.machines.append(Machine(len(world.machines), FIRST, FIRST))
        case _:
            pass


@settings(max_examples=examples(600), deadline=None)
@given(
    world=worlds(),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 5)), max_size=40),
)
def test_a_rollout_ends_in_all_new_all_old_or_failed(
    world: World, events: list[tuple[str, int]]
) -> None:
    for event, which in events:
        happen(world, event, which)
        if event != "look" and which % 2:
            world.look()
    world.settle()
    rollout = world.rollout
    digests = {machine.digest for machine in world.machines}
    assert not any(machine.prepared for machine in world.machines if not machine.failure)
    match rollout.state:
        case RolloutState.DONE | RolloutState.ROLLED_BACK:
            reachable = {m.digest for m in world.machines if not m.failure}
            goal = rollout.goal
            ways = goal if goal.base is None else goal.base
            if goal.source is not None and ways.source is not None:
                assert reachable <= {goal.digest}
            assert rollout.reason or rollout.state is RolloutState.DONE
        case RolloutState.FAILED:
            assert rollout.reason
        case _:
            raise AssertionError(f"{rollout.state} is no end; {digests}")


def test_without_trouble_all_are_new() -> None:
    for strategy in Strategy:
        for before in BEFORE:
            for count in (1, 2, 5):
                target = Weights("new", "", DiskSource("/new"))
                world = World(Rollout("r", target, before, strategy))
                world.machines = [Machine(n, FIRST, before.digest) for n in range(count)]
                world.settle()
                assert world.rollout.state is RolloutState.DONE
                assert {machine.digest for machine in world.machines} == {digest_of("/new")}
                late = Machine(count, FIRST, FIRST)
                world.machines.append(late)
                world.settle()
                assert late.digest == digest_of("/new")
