"""Cores of a fleet in any order of events, and no shell: where sequences are, and why they move.

Against a naive model: each sequence is in one core; each gets what it gets alone; whoever waits has
a reason to. Only what core/fleet.py and core/exchange.py say is done.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from control_plane.core import invariants
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import FinishReason
from control_plane.core.exchange import Exchange
from control_plane.core.fleet import Member, MemberState, evacuation, places, relief
from control_plane.core.placement import Leads
from control_plane.core.plan import StepPlan
from control_plane.core.request import (
    Request,
    RequestId,
    SamplingParams,
    SequenceId,
    StopConditions,
)
from control_plane.core.scheduler import Scheduler
from control_plane.core.sequence import Sequence
from control_plane.core.succession import Traits
from tests.support.checking_worker import WEIGHTS, CheckingWorker
from tests.support.naive_model import alone
from tests.support.quick import examples

LONGEST = 24
PROMPTS = st.sampled_from([(2,), (3, 4), (1, 2, 3, 4, 0, 1, 2), (1, 2, 3, 4, 0, 4), (4,) * 12])
picks = st.integers(0, 99)


class Core:
    """A core, its worker, and the plans between them."""

    def __init__(self, number: int, config: SchedulerConfig) -> None:
        self.number = number
        self.config = config
        self.epoch = 1
        self.state = MemberState.ATTACHED
        self.core = Scheduler(config, self.epoch, WEIGHTS)
        self.salts: dict[int, str] = {}
        """One for each seed."""
        self.worker = CheckingWorker(config, self.epoch, self.salts)
        self.sent: deque[StepPlan] = deque()

    @property
    def member(self) -> Member:
        traits = Traits(WEIGHTS.digest, "same", 5, self.config.max_sequence_token_count)
        return Member(self.number, self.core, traits, self.state)

    @property
    def attached(self) -> bool:
        return self.state is MemberState.ATTACHED


def _first_that_waits(core: Core) -> Sequence | None:
    """The first of a queue that could go elsewhere, unless the queue moves by itself."""
    ledger = core.core.ledger
    for index, sequence in enumerate(ledger.waiting):
        if not index and core.attached and ledger.free_rows and not ledger.suspects:
            length = len(sequence.token_ids)
            if -(-length // 2) + len(ledger.running) <= ledger.pool.free_count:
                return None
        if not sequence.pending and sequence.sequence_id not in ledger.suspects:
            return sequence
    return None


class PlacesMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cores: list[Core] = []
        self.requests: dict[SequenceId, Request] = {}
        self.outputs: dict[SequenceId, list[int]] = {}
        self.reasons: dict[SequenceId, FinishReason] = {}
        self.place: dict[SequenceId, int] = {}
        self.moves: Counter[SequenceId] = Counter()
        self.causes: Counter[SequenceId] = Counter()
        """How often each had a cause to move: it lost its place, or began to wait."""
        self.rearranged: set[int] = set()
        """Replicas whose last plans started or preempted somebody: that can change who is the first
        of the queue. The result of the plan brings the turn that looks at it."""

    @initialize(
        rows=st.lists(st.integers(1, 3), min_size=2, max_size=4),
        blocks=st.integers(0, 8),
        inflight=st.integers(1, 2),
        caching=st.booleans(),
    )
    def start(self, rows: list[int], blocks: int, inflight: int, caching: bool) -> None:
        self.cores = [
            Core(
                number,
                SchedulerConfig(
                    max_sequence_count=count,
                    max_step_token_count=6,
                    max_sequence_token_count=LONGEST,
                    block_count=1 + LONGEST // 2 + blocks,
                    block_size=2,
                    max_inflight_step_count=inflight,
                    enable_prefix_caching=caching,
                ),
            )
            for number, count in enumerate(rows)
        ]
        self.leads = Leads()
        self.exchange = Exchange(lambda number: self.cores[number].member, may_cross=False)

    # --- events -------------------------------------------------------------------------------

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 10), priority=st.integers(-1, 1))
    def submit(self, prompt: tuple[int, ...], max_tokens: int, priority: int) -> None:
        name = SequenceId(1 + len(self.requests))
        request = Request(
            request_id=RequestId(str(name)),
            prompt_token_ids=array("I", prompt),
            sampling=SamplingParams(temperature=0.0),
            seed=name,
            stop=StopConditions(max_tokens),
            arrival=float(name),
            priority=priority,
        )
        for core in self.cores:
            core.salts[name] = ""
        members = [core.member for core in self.cores]
        ordered = places(members, request, self.leads)
        assert {member.number for member in ordered} == {core.number for core in self.cores}
        best = ordered[0]
        could = [each.number for each in members if each.has_place_for(len(prompt), [])]
        hits = best.core.ledger.cache.find(best.core.ledger.cache.hashes(array("I", prompt), ""))
        starts = best.has_place_for(len(prompt), hits)
        assert starts or not could, "queued, though another would start it"
        best.core.add(name, request)
        self.exchange.note(best)
        self.requests[name], self.outputs[name] = request, []
        self.place[name] = best.number
        self.causes[name] += 1
        self._turn(self.cores[best.number])

    @rule(pick=picks)
    def send(self, pick: int) -> None:
        """A replica's turn comes when it has no result to wait for."""
        self._turn(self.cores[pick % len(self.cores)])

    @rule(pick=picks, count=st.integers(1, 6))
    def answer(self, pick: int, count: int) -> None:
        core = self.cores[pick % len(self.cores)]
        for _ in range(count):
            if core.attached and core.sent:
                self._answer(core)

    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        if live := self._live():
            name = live[pick % len(live)]
            core = self.cores[self.place[name]]
            assert core.core.finish(name, FinishReason.CANCELLED) is not None
            self.reasons[name] = FinishReason.CANCELLED
            self._turn(core)

    @rule(pick=picks)
    def lose(self, pick: int) -> None:
        core = self.cores[pick % len(self.cores)]
        core.state = MemberState.LOST
        core.sent.clear()
        self.rearranged.discard(core.number)
        self._evacuate(core)

    @rule(pick=picks)
    def come_back(self, pick: int) -> None:
        core = self.cores[pick % len(self.cores)]
        if core.attached:
            return
        core.epoch += 1
        core.worker = CheckingWorker(core.config, core.epoch, core.salts)
        assert core.core.resync(core.config, core.epoch, WEIGHTS) == []
        core.state = MemberState.ATTACHED
        self.causes.update(list(core.core.ledger.sequences))
        self.exchange.note(core.member)
        for other in self.cores:
            if not other.attached:
                self._evacuate(other)
        self._turn(core)

    @rule()
    def everybody_takes_a_turn(self) -> None:
        """Then no place is free for the first by rank of those that wait elsewhere."""
        attached = [core for core in self.cores if core.attached]
        for core in attached * 2:
            for move in self.exchange.moves(core.member):
                self._move(move.sequence_id, move.source, move.target)
        for core in attached:
            firsts = [_first_that_waits(other) for other in self.cores if other is not core]
            waiting = sorted((each for each in firsts if each), key=lambda each: each.rank)
            if waiting:
                length = len(waiting[0].token_ids)
                assert not core.member.would_start(length), "a place is free for who waits"
        for core in attached:
            self._turn(core)

    # --- what must hold -----------------------------------------------------------------------

    @invariant()
    def each_sequence_is_in_one_core(self) -> None:
        held = {}
        for core in self.cores:
            if core.attached:
                invariants.check(core.core)
            for name in core.core.ledger.sequences:
                assert name not in held, "in two places"
                held[name] = core.number
        assert held == {name: self.place[name] for name in self._live()}

    @invariant()
    def ranks_hold_in_each_queue(self) -> None:
        for core in self.cores:
            ranks = [sequence.rank for sequence in core.core.ledger.waiting]
            assert ranks == sorted(ranks)

    @invariant()
    def nobody_moves_without_a_cause(self) -> None:
        """Once more at most: a place can be gone before its plan is made."""
        for name, count in self.moves.items():
            assert count <= 2 * self.causes[name], f"sequence {name} goes back and forth"

    @invariant()
    def no_replica_is_idle_while_a_sequence_waits(self) -> None:
        """Not even until its next turn, which may never come; at most until the next result of
        the replica where the sequence waits."""
        for core in self.cores:
            if not core.attached or core.core.ledger.sequences or core.sent:
                continue
            for other in self.cores:
                assert other.number not in self.rearranged or other.sent, "no turn comes"
                first = _first_that_waits(other)
                if first is not None and other.number not in self.rearranged:
                    length = len(first.token_ids)
                    assert not core.member.would_start(length), "a place is free for who waits"

    # --- carrying out -------------------------------------------------------------------------

    def _turn(self, core: Core) -> None:
        """What the shell does with a replica that wakes: moves, and then plans."""
        if not core.attached:
            return
        woken = [core]
        while woken:
            turning = woken.pop()
            moved = set()
            for move in self.exchange.moves(turning.member):
                assert move.sequence_id not in moved, "twice in one turn"
                moved.add(move.sequence_id)
                assert self.cores[move.target].member.has_free_place
                woken.append(self._move(move.sequence_id, move.source, move.target))
            self._moved_all(turning)
            before = set(turning.core.ledger.running)
            while (plan := turning.core.next_message(0.0)) is not None:
                assert isinstance(plan, StepPlan)
                turning.sent.append(plan)
            after = set(turning.core.ledger.running)
            self.rearranged.discard(turning.number)
            if before != after:
                self.rearranged.add(turning.number)
            self.causes.update(each.sequence_id for each in before - after)

    def _moved_all(self, turning: Core) -> None:
        """A look at all replicas finds no more to move than the exchange found by its memory."""
        own = turning.member
        others = [core.member for core in self.cores if core is not turning]
        for other in others:
            assert relief(other, [own], may_cross=False) is None, "it keeps who waits"
        missed = relief(own, others, may_cross=False)
        assert missed is None or missed.source in self.rearranged, "it leaves who waits elsewhere"

    def _move(self, name: SequenceId, source: int, target: int) -> Core:
        sequence = self.cores[source].core.withdraw(name)
        self.cores[target].core.adopt(sequence)
        assert self.place[name] == source
        self.place[name] = target
        self.moves[name] += 1
        return self.cores[target]

    def _evacuate(self, source: Core) -> None:
        self.causes.update(list(source.core.ledger.sequences))
        members = [core.member for core in self.cores]
        woken = [
            self._move(move.sequence_id, move.source, move.target)
            for move in evacuation(source.member, members, may_cross=False)
        ]
        if any(core.attached for core in self.cores):
            assert not source.core.ledger.sequences, "left behind"
        for core in woken:
            self.exchange.note(core.member)
            self._turn(core)

    def _answer(self, core: Core) -> None:
        result = core.worker.execute(core.sent.popleft(), None)
        for output in core.core.update(result):
            self.outputs[output.sequence_id] += output.tokens.ids
            if output.finish is not None:
                self.reasons[output.sequence_id] = output.finish.reason
        self._turn(core)

    def _live(self) -> list[SequenceId]:
        return [name for name in self.requests if name not in self.reasons]

    def teardown(self) -> None:
        for core in self.cores:
            if not core.attached:
                self.come_back(core.number)
        bound = 10_000
        while self._live() or any(core.sent for core in self.cores):
            assert (bound := bound - 1), "requests do not end"
            for core in self.cores:
                self._turn(core)
                if core.sent:
                    self._answer(core)
        for name, request in self.requests.items():
            tokens, reason = alone(request, None, LONGEST)
            if self.reasons[name] is FinishReason.CANCELLED:
                assert self.outputs[name] == tokens[: len(self.outputs[name])]
            else:
                assert (self.outputs[name], self.reasons[name]) == (tokens, reason)
        for core in self.cores:
            assert not core.worker.rows
            assert core.core.stats().kv_active_tokens == 0


PlacesMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)
TestPlacesMachine = PlacesMachine.TestCase
