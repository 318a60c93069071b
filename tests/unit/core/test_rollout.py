"""What a rollout does next: views in, exact actions out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from control_plane.core.rollout import (
    Abort,
    Action,
    Busy,
    CallOff,
    Canary,
    Commit,
    Prepare,
    Rollout,
    RolloutState,
    Strategy,
    View,
    Weights,
    decide,
    step_to,
)
from control_plane.core.weights import DiskSource, InFlightPolicy, Placement, WeightsUpdate

OLD, NEW = "o" * 64, "n" * 64
BEFORE = Weights("old", OLD, DiskSource("/old"))
FRESH = Weights("new", "", DiskSource("/new"))
KNOWN = replace(FRESH, digest=NEW)
POLICY = InFlightPolicy.KEEP_KV
ONE = Rollout("r", FRESH, BEFORE, policy=POLICY, placement=Placement.BESIDE)
ALL = replace(ONE, strategy=Strategy.ALL_AT_ONCE)
READY = ("r", NEW)


def old(number: int, **changes: object) -> View:
    return replace(View(number, digest=OLD, seconds=100.0), **changes)


def new(number: int, **changes: object) -> View:
    return old(number, digest=NEW, **changes)


def away(number: int) -> View:
    return View(number, is_attached=False)


def prepare(number: int, digest: str = "") -> Prepare:
    update = WeightsUpdate("r", DiskSource("/new"), False, Placement.BESIDE, digest)
    return Prepare(number, update)


def commit(number: int) -> Commit:
    return Commit(number, "r", NEW, POLICY)


def back(number: int) -> Prepare:
    name = f"r-{OLD[:16]}"
    return Prepare(number, WeightsUpdate(name, DiskSource("/old"), False, Placement.BESIDE, OLD))


PREPARING, EXCHANGING = {"busy": Busy.PREPARING}, {"busy": Busy.EXCHANGING}
BACK = replace(ONE, target=KNOWN, state=RolloutState.ROLLING_BACK, reason="why")
BACK_READY = (f"r-{OLD[:16]}", OLD)
CASES: list[tuple[str, Rollout, list[View], list[Action], RolloutState]] = [
    ("the first begins", ONE, [old(0), old(1)], [prepare(0)], RolloutState.RUNNING),
    ("one at a time", ONE, [old(0, **PREPARING), old(1)], [], RolloutState.RUNNING),
    ("what is ready is exchanged", ONE, [old(0, prepared=READY), old(1)], [commit(0)],
     RolloutState.RUNNING),
    ("whoever has begun comes first", ONE, [old(0), old(1, prepared=READY)], [commit(1)],
     RolloutState.RUNNING),
    ("an exchange is waited for", replace(ONE, target=KNOWN),
     [old(0, prepared=READY, **EXCHANGING), old(1)], [], RolloutState.RUNNING),
    ("then the next, held to the digest", replace(ONE, target=KNOWN), [new(0), old(1)],
     [prepare(1, NEW)], RolloutState.RUNNING),
    ("whoever is away is not waited for", replace(ONE, target=KNOWN), [new(0), away(1)], [],
     RolloutState.DONE),
    ("nobody is there", ONE, [away(0)], [], RolloutState.RUNNING),
    ("nobody is left", ONE, [], [], RolloutState.RUNNING),
    ("who failed a moment ago rests", ONE, [old(0, cools=True)], [], RolloutState.RUNNING),
    ("what waits of an older update goes", ONE, [old(0, prepared=("x", NEW))], [Abort(0, "x")],
     RolloutState.RUNNING),
    ("ranks that differ are brought", replace(ONE, target=KNOWN), [old(0, digest="")],
     [prepare(0, NEW)], RolloutState.RUNNING),
    ("all are prepared together", ALL, [old(0), old(1), old(2, **PREPARING)],
     [prepare(0), prepare(1)], RolloutState.RUNNING),
    ("nobody is exchanged before", ALL, [old(0, prepared=READY), old(1, **PREPARING)], [],
     RolloutState.RUNNING),
    ("all are exchanged together", ALL, [old(0, prepared=READY), old(1, prepared=READY)],
     [commit(0), commit(1)], RolloutState.RUNNING),
    ("who joins between is brought", replace(ALL, target=KNOWN, commits=True),
     [new(0), old(1)], [prepare(1, NEW)], RolloutState.RUNNING),
    ("a refusal turns it back", ONE, [old(0, failure="no", failed_id="r"), old(1)], [],
     RolloutState.ROLLED_BACK),
    ("what another has prepared goes then", ALL,
     [old(0, failure="no", failed_id="r"), old(1, prepared=READY)], [Abort(1, "r")],
     RolloutState.ROLLED_BACK),
    ("what another prepares is called off", ALL,
     [old(0, failure="no", failed_id="r"), old(1, **PREPARING)], [CallOff(1)],
     RolloutState.ROLLING_BACK),
    ("a refusal of another update says nothing", ONE,
     [old(0, failure="no", failed_id="x")], [prepare(0)], RolloutState.RUNNING),
    ("digests that differ turn it back", replace(ONE, target=KNOWN),
     [new(0), old(1, prepared=("r", "x" * 64))], [back(0)], RolloutState.ROLLING_BACK),
    ("unsound logits turn it back", replace(ONE, target=KNOWN), [new(0, fault_count=1), old(1)],
     [back(0)], RolloutState.ROLLING_BACK),
    ("unsound logits of the old ones do not", replace(ONE, target=KNOWN),
     [new(0), old(1, fault_count=1)], [prepare(1, NEW)], RolloutState.RUNNING),
    ("all go back together", BACK, [new(0), new(1), old(2)], [back(0), back(1)],
     RolloutState.ROLLING_BACK),
    ("and are exchanged as they are ready", BACK, [new(0, prepared=BACK_READY), new(1)],
     [Commit(0, BACK_READY[0], OLD, POLICY), back(1)], RolloutState.ROLLING_BACK),
    ("an exchange under way is called off", BACK, [old(0, prepared=READY, **EXCHANGING)],
     [CallOff(0)], RolloutState.ROLLING_BACK),
    ("back where it was", BACK, [old(0, prepared=READY), old(1)], [Abort(0, "r")],
     RolloutState.ROLLED_BACK),
    ("no way back is the end", BACK, [new(0, failure="no", failed_id=BACK_READY[0])], [],
     RolloutState.FAILED),
    ("nor is one that nobody knows", replace(BACK, before=Weights(digest=OLD)), [new(0)], [],
     RolloutState.FAILED),
    ("a refusal of the way there is not", BACK, [new(0, failure="no", failed_id="r")], [back(0)],
     RolloutState.ROLLING_BACK),
    ("who comes late is brought", replace(ONE, target=KNOWN, state=RolloutState.DONE),
     [new(0), old(1), old(2)], [prepare(1, NEW), prepare(2, NEW)], RolloutState.DONE),
    ("and fails alone", replace(ONE, target=KNOWN, state=RolloutState.DONE),
     [new(0), old(1, failure="no", failed_id="r")], [], RolloutState.DONE),
    ("to the old ones too", replace(BACK, state=RolloutState.ROLLED_BACK), [old(0), new(1)],
     [back(1)], RolloutState.ROLLED_BACK),
    ("nobody where it failed", replace(BACK, state=RolloutState.FAILED), [old(0), new(1)], [],
     RolloutState.FAILED),
    ("the same weights are no news", ONE, [old(0, prepared=("r", OLD))], [Abort(0, "r")],
     RolloutState.DONE),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rollout", "views", "actions", "state"),
    [case[1:] for case in CASES],
    ids=[case[0] for case in CASES],
)
def test_what_comes_next(
    rollout: Rollout, views: list[View], actions: list[Action], state: RolloutState
) -> None:
    decision = decide(rollout, views)
    assert list(decision.actions) == actions
    assert decision.rollout.state is state
    assert decision.rollout.reason or state in (RolloutState.RUNNING, RolloutState.DONE)
    again = decide(decision.rollout, views)
    assert again.rollout.state in (decision.rollout.state, RolloutState.ROLLED_BACK)


@pytest.mark.parametrize(
    ("percent", "first"), [(1, 1), (10, 1), (25, 1), (26, 2), (50, 2), (75, 3), (99, 4)]
)
def test_so_many_are_canaries(percent: int, first: int) -> None:
    rollout = replace(ONE, target=KNOWN, canary=Canary(percent, 60.0))
    for done in range(1, 4):
        views = [new(n, seconds=10.0) for n in range(done)] + [old(n) for n in range(done, 4)]
        decision = decide(rollout, views)
        if done >= first:
            assert (decision.actions, decision.look_again) == ((), 50.0)
            proven = decide(rollout, [replace(view, seconds=60.0) for view in views])
            assert proven.rollout.is_proven
            assert proven.actions == (prepare(done, NEW),)
        else:
            assert decision.actions == (prepare(done, NEW),)


def test_both_answer_until_it_is_over() -> None:
    known = replace(ONE, target=KNOWN)
    assert decide(ONE, [old(0)]).served == (BEFORE,)
    assert decide(ONE, [old(0, prepared=READY)]).served == (BEFORE, KNOWN)
    assert decide(known, [new(0), old(1)]).served == (BEFORE, KNOWN)
    assert decide(known, [new(0)]).served == (KNOWN,)
    assert decide(BACK, [new(0)]).served == (BEFORE, KNOWN)
    assert decide(BACK, [old(0)]).served == (BEFORE,)
    failed = replace(BACK, state=RolloutState.FAILED)
    assert decide(failed, [old(0), new(1)]).served == (BEFORE, KNOWN)


def test_partial_weights_need_what_is_below_them() -> None:
    part = Weights("part", "p" * 64, DiskSource("/part"), BEFORE)
    over = Weights("over", "v" * 64, DiskSource("/over"), part)
    for digest, step in ((OLD, part), (NEW, BEFORE), ("", BEFORE)):
        assert step_to(part, digest) == step
    for digest, step in (("p" * 64, over), (OLD, part), (NEW, BEFORE)):
        assert step_to(over, digest) == step
    lost = replace(part, base=Weights(digest=OLD))
    assert step_to(lost, OLD) == lost
    assert step_to(lost, NEW) is None
