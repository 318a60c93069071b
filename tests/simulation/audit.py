"""What must hold in a simulated system between any two events."""

from __future__ import annotations

from collections import Counter

from control_plane.core import invariants
from control_plane.core.fleet import MemberState
from control_plane.core.room import can_start
from control_plane.core.scheduler import Scheduler
from control_plane.shell.replica import Replica
from tests.simulation.simulated_plane import Plane

NOTICED_SECONDS = 13.0
"""A worker that gives no sign of life for so long is lost: one without work is asked seldom."""
CARRIED_SECONDS = 0.5
"""What a lost worker had is elsewhere after so long, if anybody can take it."""


class Violation(AssertionError):
    """What must never be, was."""


def check_plane(plane: Plane) -> None:
    fleet = plane.rig.fleet
    if plane.task.done():
        plane.task.result()
        raise Violation("the fleet has stopped")
    register = fleet.register
    found: Counter[object] = Counter()
    totals: Counter[str] = Counter()
    for replica in plane.replicas:
        core = replica._core
        if core is None:
            continue
        stats = core.stats()
        if plane.checked.get(replica) != (mark := _mark(core)):
            invariants.check(core)
            plane.checked[replica] = mark
        totals["in"] += stats.moved_in
        totals["out"] += stats.moved_out
        totals["submitted"] += stats.submitted
        totals["over"] += sum(stats.finished.values())
        for sequence_id in core.ledger.sequences:
            found[sequence_id] += 1
            own = register._sequences.get(sequence_id)
            require(own is not None, f"{sequence_id} is in a core, and nobody's")
            assert own is not None
            require(own.replica is replica, f"{sequence_id} is registered elsewhere")
        _check_rows(plane, replica)
    twice = [name for name, count in found.items() if count > 1]
    require(not twice, f"in two places: {twice}")
    lost = register._sequences.keys() - found.keys()
    require(not lost, f"in no place: {lost}")
    require(totals["in"] == totals["out"], f"moves do not match: {totals}")
    live = len(register._sequences)
    require(totals["submitted"] == totals["over"] + live, f"miscounted: {totals}, {live} live")
    ready = any(
        replica.attached and replica.state is not MemberState.DRAINING for replica in fleet.replicas
    )
    told = plane.rig.readiness[-1] if plane.rig.readiness else False
    require(fleet.ready == ready == told, f"ready is {ready}, and told is {told}")


def _mark(core: Scheduler) -> tuple[object, ...]:
    """Differs whenever anything was done to a core."""
    ledger = core.ledger
    counters = ledger.counters
    return (
        ledger.epoch,
        ledger.last_step_id,
        ledger.answered_step_id,
        len(ledger.inflight),
        counters.submitted,
        counters.moved_in,
        counters.moved_out,
        sum(counters.finished.values()),
        counters.preemptions,
    )


def _check_rows(plane: Plane, replica: Replica) -> None:
    """Nothing runs on two claims: each row of a worker is that of a sequence that runs there."""
    core = replica._core
    assert core is not None
    connection = plane.connections[plane.replicas.index(replica)]
    machine, ledger = connection.machine, core.ledger
    if not (replica.attached and connection.connected) or machine.epoch != ledger.epoch:
        return
    if ledger.inflight or ledger.last_step_id != machine.last_step:
        return
    running = {sequence.row: sequence.request.seed for sequence in ledger.running}
    for number, row in machine.rows.items():
        if number not in ledger.released_rows:
            require(running.get(number) == row.seed, f"row {number} has somebody else's tokens")


def check_losses(plane: Plane, now: float) -> None:
    """A silent worker is noticed, and what a lost one had goes on where somebody can take it."""
    may_cross = plane.world.scenario.may_cross
    members = plane.rig.fleet.roster.members()
    for host, replica in plane.of_host.items():
        if replica.attached:
            plane.away_since.pop(replica, None)
            silent = now - host.silent_since
            require(silent <= NOTICED_SECONDS, f"replica {replica.number} is silent, unnoticed")
            continue
        since = plane.away_since.setdefault(replica, now)
        own = replica.member()
        if own is None or now - since <= CARRIED_SECONDS:
            continue
        for sequence in own.core.ledger.sequences.values():
            # One that never began may wait here because the queues elsewhere are full.
            begun = sequence.completion_count > 0 and sequence.started_at is not None
            able = [
                other.number
                for other in members
                if other.is_present
                and other.traits.max_sequence_token_count >= sequence.token_limit
                and (may_cross or other.traits.arithmetic == own.traits.arithmetic)
            ]
            is_tried = sequence.sequence_id in own.core.ledger.suspects  # its worker may be back
            require(
                not (begun and able) or is_tried,
                f"{sequence.sequence_id} stays behind: {able} could",
            )


def check_busy(plane: Plane) -> None:
    """No replica is idle while a sequence waits elsewhere that it could take."""
    members = plane.rig.fleet.roster.members()
    for own in members:
        ledger = own.core.ledger
        if not own.is_present or own.core.has_work or not own.has_free_place:
            continue
        for other in members:
            queue = [] if other is own else list(other.core.ledger.waiting)
            idle_for = [
                sequence.sequence_id
                for sequence in queue
                if not sequence.pending
                and sequence.sequence_id not in other.core.ledger.suspects
                and other.traits == own.traits
                and can_start(ledger, len(sequence.token_ids), [])
            ]
            require(not idle_for, f"{own.number} is idle while {idle_for} wait at {other.number}")


def where(plane: Plane) -> str:
    """Where everything is, for people."""
    told = []
    for replica in plane.rig.fleet.replicas:
        core = replica._core
        ids = {} if core is None else core.ledger.sequences
        told.append(f"replica {replica.number} {replica.state.value}: {list(ids)}")
    return "; ".join(told)


def require(condition: object, message: str) -> None:
    if not condition:
        raise Violation(message)
