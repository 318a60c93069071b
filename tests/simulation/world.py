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

from control_plane.core.claim import ClaimPolicy
from control_plane.core.errors import QueueFull
from control_plane.core.events import FinishReason
from control_plane.core.fleet import MemberState
from control_plane.core.request import Request, RequestId, Resumed
from control_plane.shell.engine import EngineLost
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream
from control_plane.shell.successor import ArithmeticChange
from tests.simulation import scenario as events
from tests.simulation.audit import Violation, check_busy, check_losses, check_plane, require, where
from tests.simulation.fake_machine import expected_tokens
from tests.simulation.hosts import Connection, Host
from tests.simulation.rig import StopAt, request, until
from tests.simulation.scenario import Ask, Scenario
from tests.simulation.simulated_plane import Plane, Seen, WatchedStream
from tests.simulation.virtual_time import VirtualLoop, run_virtual

SETTLING_SECONDS = 7.0
"""After the last event, while what is broken stays so: longer than a silent worker is noticed."""
QUIET_SECONDS = 90.0
"""Of virtual time, for everything to end once nothing goes wrong any more."""
TICK_SECONDS = 0.25
MOST_CHECKS = 300_000
"""More are a run that gets nowhere."""


@dataclass(slots=True, eq=False)
class Outcome:
    """What a run came to. `answers` by the number of the request."""

    asked: dict[int, Ask] = field(default_factory=dict)
    answers: dict[int, Seen] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    placed: list[set[int]] = field(default_factory=list)
    """Per worker, the seeds of the requests that it was given."""
    ended_at: float = 0.0


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
        require(not left, f"tasks are left: {left}")
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
                require(not self._can_serve(plane), "refused, though a worker is there")
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
            require(seen.tokens == right, f"r{ask.number} got wrong tokens")
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
        require(self._check_count < MOST_CHECKS, "the run gets nowhere")
        for plane in self.planes:
            if not plane.is_dead:
                check_plane(plane)
                check_losses(plane, self.loop.time())

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
                raise Violation(f"these do not end: {late}; {where(self.plane)}")
            await asyncio.sleep(0.05)
            if self.loop.time() > deadline - QUIET_SECONDS + 20.0:
                check_busy(self.plane)

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
        require(len(fleet.replicas) == len(self.hosts) - len(self.leaving), "somebody stays")
        require(fleet.ready, "not ready at the end")
        require(fleet.register.empty.is_set() and not fleet.register.requests, "something runs")
        require(not fleet._mover._graces, "timers are left")
        for replica in plane.replicas:
            if (core := replica._core) is not None:
                stats = core.stats()
                held = (stats.running, stats.waiting, stats.kv_active_tokens)
                if replica in fleet.replicas:  # one that left waits for no result
                    held += (stats.inflight,)
                require(not any(held), f"replica {replica.number} holds {held}")
                self.outcome.counts["preemptions"] += stats.preemptions
                self.outcome.counts["moves"] += stats.moved_in
        for host in self.hosts:
            if host not in self.leaving and plane.claims(host):
                require(not host.machine.rows, "an idle worker holds rows")
            self.outcome.counts["attaches"] += sum(c.attach_count for c in host.connections)
        for number, ask in self.outcome.asked.items():
            self._check_answer(ask, self.outcome.answers[number])

    def _check_answer(self, ask: Ask, seen: Seen) -> None:
        name = f"r{ask.number}"
        require(seen.end_count == 1, f"{name} ended {seen.end_count} times")
        if seen.error is not None:
            lost = isinstance(seen.error, EngineLost) and self.scenario.patience < 1e9
            require(lost and seen.excused, f"{name} failed: {seen.error!r}")
            return
        if seen.finish is None:
            require(seen.cancelled, f"{name} has no end")
            return
        if seen.finish.arithmetic_changed:
            require(self.scenario.may_cross, f"{name} crossed arithmetics")
        length = len(seen.tokens)
        stops = [token in ask.stop_ids for token in seen.tokens]
        require(not any(stops[:-1]), f"{name} went on after a stop token")
        longest = min(host.machine.max_sequence_token_count for host in self.hosts)
        at_stop_string = bool(ask.stop_after) and length == ask.stop_after
        match seen.finish.reason:
            case FinishReason.LENGTH:
                whole = length == ask.max_tokens or len(ask.prompt) + length >= longest
                require(whole, f"{name} is cut at {length}")
            case FinishReason.STOP:
                require(at_stop_string or stops[-1], f"{name} has stopped for nothing")
            case FinishReason.CANCELLED:
                require(seen.cancelled, f"{name} was cancelled by nobody")
            case FinishReason.FAULT:
                require(ask.seed in self.poison, f"{name} is innocent")
        require(length <= ask.max_tokens, f"{name} has too many tokens")
        usage = seen.finish.usage
        require(usage.completion_tokens == length, f"{name} counts {usage}")
        require(usage.prompt_tokens == len(ask.prompt), f"{name} counts {usage}")
        cached_most = usage.prompt_tokens - (not seen.resume_count)
        require(usage.cached_prompt_tokens <= cached_most, f"{name} counts {usage}")


def play(played: Scenario) -> Outcome:
    """Plays a scenario in virtual time. Raises what went wrong, in groups."""

    async def main(loop: VirtualLoop) -> Outcome:
        return await World(loop, played).run()

    return run_virtual(main)
