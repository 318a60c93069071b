"""Real cores in virtual time, for bench/placement.py: no loop, no streams, no workers.

A step takes as long as its tokens say. What the shell's mover does between steps is done here, too,
by the same core code.
"""

from __future__ import annotations

import heapq
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from bench.shared_prefixes import ANSWER_TOKEN, Conversation, Oracle, Shape, Trace
from control_plane.core.config import SchedulerConfig
from control_plane.core.exchange import Exchange
from control_plane.core.fleet import Member, MemberState, places
from control_plane.core.placement import Leads
from control_plane.core.plan import StepPlan, StepResult, WeightVersion
from control_plane.core.request import Request, SequenceId
from control_plane.core.scheduler import Scheduler
from control_plane.core.succession import Traits
from control_plane.core.tokens import Tokens

STEP_SECONDS = 0.004
TOKEN_SECONDS = 0.00002
"""What a step takes, and each of its tokens: a small model on one accelerator, roughly."""

CONFIG = SchedulerConfig(
    max_sequence_count=32,
    max_step_token_count=2048,
    max_sequence_token_count=8192,
    block_count=8193,
    block_size=16,
    max_waiting_count=1_000_000,
    max_inflight_step_count=1,
)
_TRAITS = Traits("w", "a", 1 << 20, CONFIG.max_sequence_token_count)

Policy = Callable[[Sequence[Member], Request], Member]


def ours() -> Policy:
    """The fleet's own."""
    leads = Leads()
    return lambda members, request: places(members, request, leads)[0]


def at_random() -> Policy:
    """Any."""
    rng = random.Random(0)
    return lambda members, request: rng.choice(members)


def least_loaded() -> Policy:
    """Where the fewest tokens of KV are in use or waited for; of equals any."""
    rng = random.Random(0)

    def choose(members: Sequence[Member], request: Request) -> Member:
        return min(members, key=lambda member: (_kv_tokens(member.core), rng.random()))

    return choose


def _kv_tokens(core: Scheduler) -> int:
    ledger = core.ledger
    held = ledger.pool.referenced_count * ledger.config.block_size
    return held + ledger.waiting.prompt_token_count


@dataclass(slots=True, eq=False)
class Simulated:
    """A replica: its core, and how far each row's tokens are known on its worker."""

    member: Member
    lengths: dict[int, int] = field(default_factory=dict)
    is_busy: bool = False

    def answer(self, plan: StepPlan) -> StepResult:
        """A token for every row whose known tokens are complete."""
        for added in plan.added:
            self.lengths[added.row] = len(added.token_ids)
        columns = plan.scheduled
        rows = [
            row
            for row, start, number in zip(
                columns.rows, columns.start_positions, columns.token_counts, strict=True
            )
            if start + number >= self.lengths[row]
        ]
        return StepResult(
            plan.epoch, plan.step_id, rows, [1] * len(rows), Tokens([ANSWER_TOKEN] * len(rows))
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run; `computed` tokens by replica, waits in seconds, tokens of all prompts."""

    hit_tokens: int
    oracle_tokens: int
    prompt_tokens: int
    computed: tuple[int, ...]
    moves: int
    median_start_seconds: float

    @property
    def of_oracle(self) -> float:
        """Hits over those of the oracle."""
        return self.hit_tokens / self.oracle_tokens

    @property
    def most(self) -> float:
        """The most tokens that a replica computed, over the mean."""
        return max(self.computed) * len(self.computed) / sum(self.computed)

    @property
    def least(self) -> float:
        """The fewest, over the mean."""
        return min(self.computed) * len(self.computed) / sum(self.computed)


class Run:
    """A trace through a fleet: `load` is the share of the fleet's time that it needs, if nothing is
    computed twice and the rows are shared by as many as there are."""

    def __init__(
        self, replica_count: int, policy: Policy, load: float, request_count: int, shape: Shape,
        seed: int = 0,
    ) -> None:  # fmt: skip
        version = WeightVersion(1, "w")
        self._replicas = [
            Simulated(Member(number, Scheduler(CONFIG, 1, version), _TRAITS, MemberState.ATTACHED))
            for number in range(replica_count)
        ]
        self._members = [replica.member for replica in self._replicas]
        self._exchange = Exchange(self._members.__getitem__, may_cross=True)
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._numbers = count(1)
        self._left = request_count
        self._open: dict[SequenceId, Conversation] = {}
        self._asked: dict[SequenceId, float] = {}
        self._oracle = Oracle(CONFIG.block_size)
        self._starts: list[float] = []
        self._hit_tokens = self._oracle_tokens = self._prompt_tokens = self._moves = 0
        prompt, answer = shape.mean_demand
        seconds = prompt * TOKEN_SECONDS + answer * (
            TOKEN_SECONDS + STEP_SECONDS / CONFIG.max_sequence_count
        )
        self._gap = seconds * shape.mean_turns / (load * replica_count)
        """Mean seconds between conversations."""
        self._rng = random.Random(seed)
        self._conversations: Iterator[Conversation] = Trace(shape, seed).conversations()

    def outcome(self) -> Outcome:
        """Runs to the end."""
        self._at(0.0, self._begin)
        while self._events:
            now, _, action = heapq.heappop(self._events)
            action(now)
        self._starts.sort()
        return Outcome(
            self._hit_tokens,
            self._oracle_tokens,
            self._prompt_tokens,
            tuple(member.core.ledger.counters.computed_tokens for member in self._members),
            self._moves,
            self._starts[len(self._starts) // 2],
        )

    def _at(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), action))

    def _begin(self, now: float) -> None:
        """The next conversation begins, and later the one after it."""
        if self._left > 0:
            self._ask(next(self._conversations), now)
            self._at(now + self._rng.expovariate(1.0 / self._gap), self._begin)

    def _ask(self, conversation: Conversation, now: float) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        sequence_id = SequenceId(next(self._numbers))
        request = conversation.ask(sequence_id, now)
        member = self._policy(self._members, request)
        prompt = request.prompt_token_ids
        assert isinstance(prompt, array)
        self._prompt_tokens += len(prompt)
        self._oracle_tokens += self._oracle.hits(prompt)
        self._open[sequence_id] = conversation
        self._asked[sequence_id] = now
        member.core.add(sequence_id, request)
        self._exchange.note(member)
        self._turn(self._replicas[member.number], now)

    def _turn(self, replica: Simulated, now: float) -> None:
        """What the shell does between two steps, unless one runs."""
        if replica.is_busy:
            return
        moved = set()
        for move in self._exchange.moves(replica.member):
            sequence = self._members[move.source].core.withdraw(move.sequence_id)
            self._members[move.target].core.adopt(sequence)
            moved.add(move.target)
            self._moves += 1
        plan = replica.member.core.schedule(now)
        if plan is not None:
            replica.is_busy = True
            tokens = sum(plan.scheduled.token_counts)
            seconds = STEP_SECONDS + TOKEN_SECONDS * tokens
            self._at(now + seconds, lambda then: self._end_step(replica, plan, then))
        for number in moved - {replica.member.number}:
            self._turn(self._replicas[number], now)

    def _end_step(self, replica: Simulated, plan: StepPlan, now: float) -> None:
        replica.is_busy = False
        for output in replica.member.core.update(replica.answer(plan)):
            finish = output.finish
            if finish is not None:
                conversation = self._open.pop(output.sequence_id)
                self._hit_tokens += finish.usage.cached_prompt_tokens
                started = now if finish.started_at is None else finish.started_at
                self._starts.append(started - self._asked.pop(output.sequence_id))
                pause = conversation.answered()
                self._oracle.learn(conversation.log)
                if conversation.turns_left:
                    self._at(now + pause, lambda then, of=conversation: self._ask(of, then))
        self._turn(replica, now)
