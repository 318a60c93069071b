"""Plays a scenario: the real fleet, cores and claims, on workers, a network and a clock that are
not. After every message and every event the books of all of them have to balance; once nothing goes
wrong any more everything ends, and nothing is left.
"""

from __future__ import annotations

import asyncio
import random
from array import array
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import count

from control_plane.core import invariants
from control_plane.core.claim import ClaimPolicy
from control_plane.core.errors import QueueFull
from control_plane.core.events import Finish, FinishReason
from control_plane.core.fleet import MemberState
from control_plane.core.request import Request, RequestId, Resumed
from control_plane.core.scheduler import Scheduler
from control_plane.shell.engine import EngineLost
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import Replica, ReplicaSettings
from control_plane.shell.stream import TokenStream
from control_plane.shell.successor import ArithmeticChange
from tests.simulation import scenario as events
from tests.simulation.fake_worker import expected_tokens
from tests.simulation.hosts import Connection, Host
from tests.simulation.rig import Rig, StopAt, request, until
from tests.simulation.scenario import Ask, Scenario
from tests.simulation.virtual_time import VirtualLoop, run_virtual

SETTLING_SECONDS = 7.0
"""After the last event, while what is broken stays so: longer than a silent worker is noticed."""
QUIET_SECONDS = 90.0
"""Of virtual time, for everything to end once nothing goes wrong any more."""
NOTICED_SECONDS = 5.5
"""A worker that gives no sign of life for so long is lost."""
CARRIED_SECONDS = 0.5
"""What a lost worker had is elsewhere after so long, if anybody can take it."""
TICK_SECONDS = 0.25
MOST_CHECKS = 300_000
"""More are a run that gets nowhere."""


class Violation(AssertionError):
    """What must never be, was."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What a run came to. `answers` by the number of the request."""

    asked: dict[int, Ask] = field(default_factory=dict)
    answers: dict[int, Seen] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    placed: list[set[int]] = field(default_factory=list)
    """Per worker, the seeds of the requests that it was given."""
    ended_at: float = 0.0


@dataclass(slots=True, eq=False)
class Seen:
    """What a client saw, over all control planes it asked. `excused`: nobody could have served."""

    tokens: list[int] = field(default_factory=list)
    finish: Finish | None = None
    error: Exception | None = None
    end_count: int = 0
    resume_count: int = 0
    cancelled: bool = False
    excused: bool = False


class Plane:
    """One life of a control plane."""

    def __init__(self, loop: VirtualLoop, world: World, hosts: list[Host], seed: int) -> None:
        self.world = world
        chosen = world.settings()
        self.connections = [world.connect(host) for host in hosts]
        self.rig = Rig(
            loop, self.connections, chosen, seed, clock=lambda: loop.time() + world.ahead
        )
        self.replicas: list[Replica] = list(self.rig.fleet.replicas)
        """Those that have left, too."""
        self.of_host = dict(zip(hosts, self.replicas, strict=True))
        self.is_dead = False
        self.away_since: dict[Replica, float] = {}
        """Of replicas without their worker: when that was seen first."""
        self.checked: dict[Replica, tuple[object, ...]] = {}
        """Of replicas whose books were found right: how they stood then."""
        self.task = asyncio.create_task(self.rig.fleet.run())

    async def die(self) -> None:
        self.is_dead = True
        for connection in self.connections:
            connection.break_connection(self.world.rng.randrange(3))
            connection.host.connections.remove(connection)
        self.task.cancel()
        await asyncio.wait([self.task])

    def join(self, host: Host) -> None:
        connection = self.world.connect(host)
        self.connections.append(connection)
        self.of_host[host] = replica = self.rig.fleet.join(connection)
        self.replicas.append(replica)

    def leave(self, host: Host) -> None:
        self.rig.fleet.leave(self.of_host[host])

    def claims(self, host: Host) -> bool:
        """Whether a worker is this plane's: of a rival it hears only with its next step."""
        core = self.of_host[host]._core
        return core is not None and core.ledger.epoch == host.machine.epoch

    def could_serve(self, ask: Ask) -> bool:
        """Whether a worker is there that surely can go on with a request, to the same length."""
        played = self.world.scenario
        if not played.may_cross and len({host.machine.arithmetic for host in self.of_host}) > 1:
            return False
        longest = max(host.machine.max_sequence_token_count for host in self.of_host)
        wanted = min(len(ask.prompt) + ask.max_tokens, longest)
        return any(
            replica.attached and host.machine.max_sequence_token_count >= wanted
            for host, replica in self.of_host.items()
            if host not in self.world.leaving
        )


class WatchedStream(TokenStream):
    """Notes, when it fails, whether anybody could have served it then."""

    def __init__(self, plane: Plane, ask: Ask, seen: Seen, sink: StopAt | None) -> None:
        super().__init__(sink)
        self._plane = plane
        self._ask = ask
        self._seen = seen

    def fail(self, error: Exception) -> None:
        self._seen.excused = self._plane.is_dead or not self._plane.could_serve(self._ask)
        super().fail(error)


class World:
    """One run. `violation` is the first thing that was wrong."""

    def __init__(self, loop: VirtualLoop, played: Scenario) -> None:
        self.loop = loop
        self.scenario = played
        self.rng = random.Random(f"{played.seed} world")
        self.poison: dict[int, int] = {}
        self._host_names = map("fake-{}".format, count())
        self.hosts = [self._host(spec) for spec in played.specs]
        self.leaving: set[Host] = set()
        self.ahead = 0.0
        self.outcome = Outcome()
        self.planes: list[Plane] = []
        self.group = asyncio.TaskGroup()
        self._check_count = 0

    # --- what planes are made of --------------------------------------------------------------

    def settings(self) -> ReplicaSettings:
        played = self.scenario
        return ReplicaSettings(
            scheduling=SchedulingSettings(
                async_scheduling=not played.synchronous,
                enable_prefix_caching=played.caching,
                max_waiting_count=played.max_waiting,
            ),
            claim=ClaimPolicy(
                loss_patience=played.patience,
                contention_delay=1.0,
                longest_contention_delay=5.0,
                max_failed_claims=1_000_000,
            ),
            arithmetic_change=(
                ArithmeticChange.CONTINUE if played.may_cross else ArithmeticChange.END
            ),
            check_invariants=True,
        )

    def connect(self, host: Host) -> Connection:
        return Connection(host, self.poison, self.check)

    def _host(self, spec: events.Spec) -> Host:
        name = next(self._host_names)
        return Host(spec, name, random.Random(f"{self.scenario.seed} {name}"))

    @property
    def plane(self) -> Plane:
        """The one that clients ask now."""
        return self.planes[-1]

    # --- the run ------------------------------------------------------------------------------

    async def run(self) -> Outcome:
        self.planes.append(Plane(self.loop, self, self.hosts, self.scenario.seed))
        async with self.group:
            await self._play()
            await self._quieten()
            await self._check_end()
            await self.plane.die()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        _require(not left, f"tasks are left: {left}")
        for host in self.hosts:
            plans = host.machine.executed_plans
            self.outcome.placed.append({own.seed for plan in plans for own in plan.added})
        self.outcome.ended_at = self.loop.time()
        return self.outcome

    async def _play(self) -> None:
        for timed in self.scenario.events:
            while (left := timed.at - self.loop.time()) > 0:
                await asyncio.sleep(min(left, TICK_SECONDS))
                self.check()
            self._happen(timed.event)
            self.check()
        for _ in range(round(SETTLING_SECONDS / TICK_SECONDS)):
            await asyncio.sleep(TICK_SECONDS)
            self.check()

    def _happen(self, event: events.Event) -> None:
        self.outcome.counts[type(event).__name__] += 1
        match event:
            case events.Ask():
                self.outcome.asked[event.number] = event
                self.outcome.answers[event.number] = seen = Seen()
                self.group.create_task(self._client(event, seen))
            case events.Cancel(number):
                self._cancel(number)
            case events.Jump(seconds):
                self.ahead += seconds
            case events.Join(spec):
                host = self._host(spec)
                self.hosts.append(host)
                self.plane.join(host)
            case events.Poison(number, position):
                if number in self.outcome.asked:
                    self.poison[self.outcome.asked[number].seed] = position
            case events.NewPlane(overlap):
                self._new_plane(overlap)
            case _:
                if event.worker < len(self.hosts):
                    self._happen_to(self.hosts[event.worker], event)

    def _happen_to(self, host: Host, event: events.Event) -> None:
        match event:
            case events.Break(_, executed):
                host.break_connections(executed)
            case events.Kill(_, seconds):
                host.kill()
                self.loop.call_later(seconds, host.show)
            case events.Hide(_, seconds):
                host.hide()
                self.loop.call_later(seconds, host.show)
            case events.Hang(_, seconds):
                host.hush(host.running, self.loop.time())
                self.loop.call_later(seconds, self._speak, host, host.running)
            case events.Cut(_, seconds):
                host.hush(host.passing, self.loop.time())
                self.loop.call_later(seconds, self._speak, host, host.passing)
            case events.Slow(_, seconds, step_seconds):
                host.extra_seconds = step_seconds
                self.loop.call_later(seconds, setattr, host, "extra_seconds", 0.0)
            case events.Twice():
                host.twice = True
            case events.Swap():
                host.swap = True
            case events.Rival(_, ahead):
                host.machine.claim(host.machine.epoch + ahead)
            case events.Leave():
                if host not in self.leaving and len(self.hosts) - len(self.leaving) > 1:
                    self.leaving.add(host)
                    self.plane.leave(host)

    def _speak(self, host: Host, gate: asyncio.Event) -> None:
        host.speak(gate, self.loop.time())

    def _new_plane(self, overlap: float) -> None:
        old = self.plane
        staying = [host for host in self.hosts if host not in self.leaving]
        self.planes.append(Plane(self.loop, self, staying, self.rng.randrange(1000)))

        async def end() -> None:
            await asyncio.sleep(overlap)
            await old.die()

        self.group.create_task(end())

    def _cancel(self, number: int) -> None:
        if (seen := self.outcome.answers.get(number)) is None:
            return
        seen.cancelled = True
        for plane in self.planes:
            if not plane.is_dead:
                plane.rig.fleet.finish(RequestId(f"r{number}"), FinishReason.CANCELLED)

    # --- clients ------------------------------------------------------------------------------

    async def _client(self, ask: Ask, seen: Seen) -> None:
        """Asks, and goes on where it was when the control plane is another."""
        while not seen.end_count:
            plane = self.plane
            if seen.cancelled:
                seen.end_count += 1
                return
            sink = StopAt(ask.stop_after - len(seen.tokens)) if ask.stop_after else None
            stream = WatchedStream(plane, ask, seen, sink)
            try:
                plane.rig.fleet.submit(self._request(ask, seen), stream)
            except QueueFull:
                self.outcome.counts["refused"] += 1
                await asyncio.sleep(0.5)
            except EngineLost:
                _require(not self._can_serve(plane), "refused, though a worker is there")
                await asyncio.sleep(0.5)
            else:
                await self._read(plane, stream, ask, seen)

    async def _read(self, plane: Plane, stream: TokenStream, ask: Ask, seen: Seen) -> None:
        while True:
            try:
                delta = await stream.take()
            except Exception as error:
                if not plane.is_dead:
                    seen.error = error
                    seen.end_count += 1
                seen.resume_count += 1
                return
            if plane.is_dead:
                seen.resume_count += 1
                return  # what came after its death never arrived
            seen.tokens += delta.tokens.ids
            right = expected_tokens(ask.prompt, len(seen.tokens), ask.seed)
            _require(seen.tokens == right, f"r{ask.number} got wrong tokens")
            if delta.finish is not None:
                seen.finish = delta.finish
                seen.end_count += 1
                return

    def _request(self, ask: Ask, seen: Seen) -> Request:
        """A request, with what it has generated already when the control plane is a new one."""
        made = request(
            f"r{ask.number}",
            ask.prompt,
            ask.max_tokens,
            arrival=self.loop.time() + self.ahead,
            seed=ask.seed,
            stop_token_ids=ask.stop_ids,
            priority=ask.priority,
        )
        resumed = Resumed(array("I", seen.tokens)) if seen.tokens else None
        return replace(made, resumed=resumed)

    def _can_serve(self, plane: Plane) -> bool:
        return any(
            replica.state in (MemberState.ATTACHED, MemberState.SUSPECT)
            for replica in plane.rig.fleet.replicas
        )

    # --- what must hold -----------------------------------------------------------------------

    def check(self) -> None:
        """Between any two events. Raises AssertionError."""
        self._check_count += 1
        _require(self._check_count < MOST_CHECKS, "the run gets nowhere")
        for plane in self.planes:
            if not plane.is_dead:
                _check_plane(plane)
                _check_losses(plane, self.loop.time())

    async def _quieten(self) -> None:
        """Nothing goes wrong any more, and everything ends."""
        for host in self.hosts:
            host.heal()
        await asyncio.sleep(0)
        deadline = self.loop.time() + QUIET_SECONDS
        while not all(seen.end_count for seen in self.outcome.answers.values()):
            self.check()
            if self.loop.time() > deadline:
                late = [n for n, seen in self.outcome.answers.items() if not seen.end_count]
                raise Violation(f"these do not end: {late}; {_where(self.plane)}")
            await asyncio.sleep(0.05)
            if self.loop.time() > deadline - QUIET_SECONDS + 20.0:
                _check_busy(self.plane)

    async def _check_end(self) -> None:
        plane = self.plane
        await asyncio.sleep(5.0)  # whatever broke last has been noticed by then
        async with asyncio.timeout(60.0):
            await until(lambda: all(other.is_dead for other in self.planes[:-1]))
            await until(
                lambda: all(
                    replica.attached and not core.has_work
                    for replica in plane.rig.fleet.replicas
                    if (core := replica._core) is not None
                )
            )
        await asyncio.sleep(0.1)
        self.check()
        fleet = plane.rig.fleet
        _require(len(fleet.replicas) == len(self.hosts) - len(self.leaving), "somebody stays")
        _require(fleet.ready, "not ready at the end")
        _require(fleet.register.empty.is_set() and not fleet.register.requests, "something runs")
        _require(not fleet._mover._graces, "timers are left")
        for replica in plane.replicas:
            if (core := replica._core) is not None:
                stats = core.stats()
                held = (stats.running, stats.waiting, stats.inflight, stats.kv_active_tokens)
                _require(not any(held), f"replica {replica.number} holds {held}")
                self.outcome.counts["preemptions"] += stats.preemptions
                self.outcome.counts["moves"] += stats.moved_in
        for host in self.hosts:
            if host not in self.leaving and plane.claims(host):
                _require(not host.machine.rows, "an idle worker holds rows")
            self.outcome.counts["attaches"] += sum(c.attach_count for c in host.connections)
        for number, ask in self.outcome.asked.items():
            self._check_answer(ask, self.outcome.answers[number])

    def _check_answer(self, ask: Ask, seen: Seen) -> None:
        name = f"r{ask.number}"
        _require(seen.end_count == 1, f"{name} ended {seen.end_count} times")
        if seen.error is not None:
            lost = isinstance(seen.error, EngineLost) and self.scenario.patience < 1e9
            _require(lost and seen.excused, f"{name} failed: {seen.error!r}")
            return
        if seen.finish is None:
            _require(seen.cancelled, f"{name} has no end")
            return
        if seen.finish.arithmetic_changed:
            _require(self.scenario.may_cross, f"{name} crossed arithmetics")
        length = len(seen.tokens)
        stops = [token in ask.stop_ids for token in seen.tokens]
        _require(not any(stops[:-1]), f"{name} went on after a stop token")
        longest = min(host.machine.max_sequence_token_count for host in self.hosts)
        at_stop_string = bool(ask.stop_after) and length == ask.stop_after
        match seen.finish.reason:
            case FinishReason.LENGTH:
                whole = length == ask.max_tokens or len(ask.prompt) + length >= longest
                _require(whole, f"{name} is cut at {length}")
            case FinishReason.STOP:
                _require(at_stop_string or stops[-1], f"{name} has stopped for nothing")
            case FinishReason.CANCELLED:
                _require(seen.cancelled, f"{name} was cancelled by nobody")
            case FinishReason.FAULT:
                _require(ask.seed in self.poison, f"{name} is innocent")
        _require(length <= ask.max_tokens, f"{name} has too many tokens")
        usage = seen.finish.usage
        _require(usage.completion_tokens == length, f"{name} counts {usage}")
        _require(usage.prompt_tokens == len(ask.prompt), f"{name} counts {usage}")
        cached_most = usage.prompt_tokens - (not seen.resume_count)
        _require(usage.cached_prompt_tokens <= cached_most, f"{name} counts {usage}")


def _check_plane(plane: Plane) -> None:
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
            _require(own is not None, f"{sequence_id} is in a core, and nobody's")
            assert own is not None
            _require(own.replica is replica, f"{sequence_id} is registered elsewhere")
        _check_rows(plane, replica)
    twice = [name for name, count in found.items() if count > 1]
    _require(not twice, f"in two places: {twice}")
    lost = register._sequences.keys() - found.keys()
    _require(not lost, f"in no place: {lost}")
    _require(totals["in"] == totals["out"], f"moves do not match: {totals}")
    live = len(register._sequences)
    _require(totals["submitted"] == totals["over"] + live, f"miscounted: {totals}, {live} live")
    ready = any(replica.attached for replica in fleet.replicas)
    told = plane.rig.readiness[-1] if plane.rig.readiness else False
    _require(fleet.ready == ready == told, f"ready is {ready}, and told is {told}")


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
            _require(running.get(number) == row.seed, f"row {number} has somebody else's tokens")


def _check_losses(plane: Plane, now: float) -> None:
    """A silent worker is noticed, and what a lost one had goes on where somebody can take it."""
    may_cross = plane.world.scenario.may_cross
    members = plane.rig.fleet.roster.members()
    for host, replica in plane.of_host.items():
        if replica.attached:
            plane.away_since.pop(replica, None)
            silent = now - host.silent_since
            _require(silent <= NOTICED_SECONDS, f"replica {replica.number} is silent, unnoticed")
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
            _require(
                not (begun and able) or is_tried,
                f"{sequence.sequence_id} stays behind: {able} could",
            )


def _check_busy(plane: Plane) -> None:
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
                and ledger.can_start(len(sequence.token_ids), [])
            ]
            _require(not idle_for, f"{own.number} is idle while {idle_for} wait at {other.number}")


def _where(plane: Plane) -> str:
    """Where everything is, for people."""
    told = []
    for replica in plane.rig.fleet.replicas:
        core = replica._core
        ids = {} if core is None else core.ledger.sequences
        told.append(f"replica {replica.number} {replica.state.value}: {list(ids)}")
    return "; ".join(told)


def _require(condition: object, message: str) -> None:
    if not condition:
        raise Violation(message)


def play(played: Scenario) -> Outcome:
    """Plays a scenario in virtual time. Raises what went wrong, in groups."""

    async def main(loop: VirtualLoop) -> Outcome:
        return await World(loop, played).run()

    return run_virtual(main)
