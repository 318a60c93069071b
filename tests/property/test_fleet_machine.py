"""Two replicas behind one fleet, in any order of events: requests come and leave, workers break,
die, hide, hang, are told to end, are claimed by others, and go down in every way over what is
poisoned; what one loses goes on at the other.
Real cores and claims, virtual time.
"""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from control_plane.core import invariants
from control_plane.core.claim import ClaimPolicy
from control_plane.core.events import FinishReason
from control_plane.core.request import Request, RequestId
from control_plane.shell.engine import DuplicateRequest
from control_plane.shell.limits import SchedulingSettings
from control_plane.shell.replica import ReplicaSettings
from control_plane.shell.stream import TokenStream
from tests.simulation.fake_machine import Machine, expected_tokens
from tests.simulation.poison import Effect, PoisonedWorker
from tests.simulation.rig import Answer, Rig, number_of, request, running
from tests.simulation.virtual_time import VirtualLoop
from tests.support.quick import examples

STEP_SECONDS = 0.01
LONGEST = 32
ENOUGH_SECONDS = 120.0
"""Of virtual time, for everything to end once nothing goes wrong any more."""

numbers = st.integers(0, 1)
moments = st.sampled_from([0.0, 0.003, 0.02, 0.3])
"""Seconds until the next event."""
# Few distinct prompts, so that prefixes meet.
prompts = st.sampled_from([(2,), (3, 4), (5, 6, 7, 8, 9), (5, 6, 7, 8, 10, 11)])


class FleetMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.rig: Rig
        self.loop = VirtualLoop()
        self.runner = asyncio.Runner(loop_factory=lambda: self.loop)
        self.over = asyncio.Event()
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, Answer] = {}
        self.poison: dict[int, int] = {}

    @initialize(
        rows=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        synchronous=st.booleans(),
        effect=st.sampled_from(Effect),
    )
    def start(self, rows: tuple[int, int], synchronous: bool, effect: Effect) -> None:
        self.leaving: list[asyncio.Task[None]] = []
        self.workers = [
            PoisonedWorker(
                Machine(
                    max_sequence_count=count,
                    max_step_token_count=8,
                    max_sequence_token_count=LONGEST,
                    block_count=1 + LONGEST // 4 + count,
                    block_size=4,
                ),
                self.poison,
                effect,
                lambda: STEP_SECONDS,
            )
            for count in rows
        ]
        chosen = ReplicaSettings(
            scheduling=SchedulingSettings(async_scheduling=not synchronous),
            claim=ClaimPolicy(
                loss_patience=1e9,
                contention_delay=0.5,
                longest_contention_delay=2.0,
                # Whom nothing is certain of must not be ended in these storms of other losses.
                max_failed_claims=1_000_000 if effect is Effect.NAMED else 12,
            ),
            check_invariants=True,
        )
        self.session = self.loop.create_task(self._serve(chosen))
        while not hasattr(self, "rig"):
            self.wait(0.01)

    @rule(prompt=prompts, max_tokens=st.integers(1, 20), stops=st.booleans())
    def submit(self, prompt: tuple[int, ...], max_tokens: int, stops: bool) -> None:
        name = f"r{len(self.requests)}"
        seed = 1 + len(self.requests)
        stop_ids = expected_tokens(prompt, 3, seed)[2:] if stops else []
        asked = request(
            name, prompt, max_tokens, seed=seed, stop_token_ids=stop_ids, arrival=self.loop.time()
        )
        before = [self.rig.stats(number).submitted for number in (0, 1)]
        self.requests[name] = asked
        self.answers[name] = self.rig.submit(asked)
        grown = [self.rig.stats(number).submitted - before[number] for number in (0, 1)]
        assert sorted(grown) == [0, 1], "a request goes to one place"
        attached = [replica.attached for replica in self.rig.fleet.replicas]
        assert attached[grown.index(1)] or not any(attached), (
            "where no worker is, though one is elsewhere"
        )

    @rule(pick=st.integers(0, 99))
    def submit_twice(self, pick: int) -> None:
        if live := self._live():
            asked = self.requests[live[pick % len(live)]]
            with pytest.raises(DuplicateRequest):
                self.rig.fleet.submit(asked, TokenStream())

    @rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        if self.requests:
            name = list(self.requests)[pick % len(self.requests)]
            was_live = name in self._live()
            assert self.rig.fleet.finish(RequestId(name), FinishReason.CANCELLED) is was_live

    @rule(pick=st.integers(0, 99), position=st.integers(0, LONGEST - 1))
    def poison_one(self, pick: int, position: int) -> None:
        """From now on, a plan that computes this position of this sequence is invalid."""
        if live := self._live():
            self.poison[self.requests[live[pick % len(live)]].seed] = position

    @rule(seconds=st.sampled_from([0.01, 0.05, 3.0]))
    def wait(self, seconds: float) -> None:
        self.runner.run(asyncio.sleep(seconds))
        assert not self.session.done() or self.session.result()

    @rule(number=numbers, executed_count=st.integers(0, 2), after=moments)
    def break_connection(self, number: int, executed_count: int, after: float) -> None:
        self.workers[number].break_connection(executed_count)
        self.wait(after)

    @rule(number=numbers, after=moments)
    def restart(self, number: int, after: float) -> None:
        self.workers[number].break_connection()
        self.workers[number].machine.restart()
        self.wait(after)

    @rule(number=numbers, after=moments)
    def hide_or_show(self, number: int, after: float) -> None:
        worker = self.workers[number]
        worker.reachable = not worker.reachable
        if not worker.reachable:
            worker.break_connection()
        self.wait(after)

    @rule(number=numbers, after=st.sampled_from([0.0, 1.0, 4.0]))
    def hang(self, number: int, after: float) -> None:
        """The device finishes nothing for a while."""
        self.workers[number].hang()
        self.wait(after)
        self.workers[number].go_on()

    @rule(number=numbers, after=st.sampled_from([0.0, 1.0, 4.0]))
    def freeze(self, number: int, after: float) -> None:
        self.workers[number].freeze()
        self.wait(after)
        self.workers[number].thaw()

    @rule(number=numbers, drain=st.sampled_from([0.05, 1.0, 30.0]), after=moments)
    def terminate(self, number: int, drain: float, after: float) -> None:
        """It is told to end, and does in its time; `hide_or_show` brings its successor."""
        if self.workers[number].reachable:
            task = self.loop.create_task(self.workers[number].terminate(drain))
            self.leaving.append(task)
            self.wait(after)

    @rule(number=numbers, ahead=st.integers(1, 3), after=moments)
    def claim_by_another(self, number: int, ahead: int, after: float) -> None:
        machine = self.workers[number].machine
        machine.claim(machine.epoch + ahead)
        self.wait(after)

    @invariant()
    def the_books_balance(self) -> None:
        if not self.requests:
            return
        live = set(self._live())
        names = dict(zip(range(1, 1 + len(self.requests)), self.requests, strict=True))
        held: list[tuple[int, str]] = []
        for number in (0, 1):
            core = self.rig.core(number)
            invariants.check(core)
            held += [(number, names[sequence_id]) for sequence_id in core.ledger.sequences]
        assert sorted(name for _, name in held) == sorted(live), "lost, or in two places"
        for name in live:
            number = number_of(self.rig.fleet, RequestId(name))
            assert (number, name) in held, "the register names another place"

    @invariant()
    def nobody_gets_a_wrong_token(self) -> None:
        for name, answer in self.answers.items():
            asked = self.requests[name]
            right = expected_tokens(asked.prompt_token_ids, len(answer.tokens), asked.seed)
            assert answer.tokens == right

    @invariant()
    def no_replica_is_idle_while_a_sequence_waits(self) -> None:
        """Once everything has had a moment. What can't start for want of blocks may wait."""
        if not self.requests or not all(worker.reachable for worker in self.workers):
            return
        self.wait(0.5)
        members = self.rig.fleet.roster.members()
        for own in members:
            busy = any(sequence.pending for sequence in own.core.ledger.waiting)
            if own.core.ledger.sequences or not own.has_free_place or busy:
                continue
            for other in members:
                assert not other.core.ledger.waiting, (
                    f"idle, while another has a queue: {other.state}, "
                    f"{[other.core.story(s.sequence_id) for s in other.core.ledger.waiting]}"
                )

    def teardown(self) -> None:
        try:
            if hasattr(self, "rig") and not self.session.done():
                self._settle()
                self._check_ends()
                assert not self.loop.failures
        finally:
            self.over.set()
            if hasattr(self, "session") and not self.session.done():
                self.loop.run_until_complete(self.session)
            self.runner.close()

    def _settle(self) -> None:
        """Nothing goes wrong any more, and everything ends."""
        for task in self.leaving:
            self.loop.run_until_complete(task)
        for worker in self.workers:
            worker.reachable = True
        deadline = self.loop.time() + ENOUGH_SECONDS
        while self._is_busy():
            assert self.loop.time() < deadline, "a request does not end, or a row is not freed"
            self.wait(1.0)
        self.wait(1.0)  # for the clients

    def _check_ends(self) -> None:
        for name, asked in self.requests.items():
            answer = self.answers[name]
            assert answer.error is None and answer.end_count == 1 and answer.finish is not None
            assert answer.finish.usage.completion_tokens == len(answer.tokens)
            if answer.finish.reason is FinishReason.FAULT:
                assert asked.seed in self.poison, "an innocent was ended"
            if answer.finish.reason is FinishReason.LENGTH:
                most = LONGEST - len(asked.prompt_token_ids)
                assert len(answer.tokens) == min(asked.stop.max_tokens, most)
        for worker in self.workers:
            assert not worker.machine.rows, "an idle worker keeps rows"

    def _is_busy(self) -> bool:
        cores = (self.rig.core(0), self.rig.core(1))
        return bool(self._live()) or any(core.has_work for core in cores)

    def _live(self) -> list[str]:
        running = self.rig.fleet.register.requests
        return [name for name in self.requests if RequestId(name) in running]

    async def _serve(self, chosen: ReplicaSettings) -> None:
        async with running(self.loop, self.workers, chosen) as self.rig:
            await self.over.wait()


FleetMachine.TestCase.settings = settings(
    max_examples=examples(160), stateful_step_count=40, deadline=None
)
TestFleetMachine = FleetMachine.TestCase
