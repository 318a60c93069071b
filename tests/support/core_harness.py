"""A scheduler with a checking worker behind it, and a model of what every client must get.

Tokens are a function of seed and token log, so what a request gets alone, with no batch, no blocks
and no steps, is what it must get in any company.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import pytest

from control_plane.core import invariants
from control_plane.core.adapters import AdapterLoad
from control_plane.core.config import SchedulerConfig
from control_plane.core.errors import QueueFull, RequestTooLong
from control_plane.core.events import FinishReason, SequenceOutput
from control_plane.core.plan import Message, SamplePlan, StepPlan, StepResult, WeightVersion
from control_plane.core.request import OutputKind, Request, Resumed, SequenceId
from control_plane.core.scheduler import Scheduler
from control_plane.core.turns import MOST_PENDING
from control_plane.core.weights import InFlightPolicy
from tests.support.checking_worker import CheckingWorker, mask_of
from tests.support.naive_model import NAMED, Made, Pair, PairScanner, alone, spans_of


@dataclass
class Harness:
    """A scheduler, its worker, what lies between them, and what every client has got so far.

    `reached` counts how often a run came to what it should come to.
    """

    config: SchedulerConfig
    now: float = 0.0
    epoch: int = 1
    requests: dict[SequenceId, Request] = field(default_factory=dict)
    pairs: dict[SequenceId, Pair | None] = field(default_factory=dict)
    outputs: dict[SequenceId, list[int]] = field(default_factory=dict)
    reasons: dict[SequenceId, FinishReason] = field(default_factory=dict)
    interrupted: set[SequenceId] = field(default_factory=set)
    unmasked: set[SequenceId] = field(default_factory=set)
    """Those that hold, and whose next mask was not told yet."""
    salts: dict[int, str] = field(default_factory=dict)
    sent: deque[tuple[Message, int | None]] = field(default_factory=deque)
    """Messages that the worker has not executed, and which of their rows is to fail."""
    results: deque[StepResult] = field(default_factory=deque)
    reached: Counter[str] = field(default_factory=Counter)
    resumed_count: int = 0
    """Tokens that requests have brought."""
    weights: WeightVersion = NAMED
    made: dict[SequenceId, list[Made]] = field(default_factory=dict)
    """How each token of each was made."""
    kept: set[SequenceId] = field(default_factory=set)
    """Who has stayed in its row since other weights came."""
    loads: list[AdapterLoad] = field(default_factory=list)
    """Adapters that the worker is to load, and has not answered."""

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.config, self.epoch, NAMED)
        self.worker = CheckingWorker(self.config, self.epoch, self.salts)
        self.cached = self.config.enable_prefix_caching

    @property
    def live(self) -> list[SequenceId]:
        return [name for name in self.requests if name not in self.reasons]

    @property
    def outstanding(self) -> int:
        """Messages whose results were not delivered."""
        return len(self.sent) + len(self.results)

    def submit(self, request: Request, pair: Pair | None = None, cut: int = 0) -> None:
        """`cut`: it is resumed behind as many of its tokens, if it has more."""
        if not self.config.adapter_slot_count:
            request = replace(request, adapter=None)
        if cut:
            longest = self.config.max_sequence_token_count
            output, _ = alone(request, pair, longest, [self.weights.digest])
            tokens = output[: min(cut, len(output) - 1)]
            spans = spans_of([(self.weights.digest, False)] * len(tokens))
            request = replace(request, resumed=Resumed(tokens, spans=spans))
        begun = [] if request.resumed is None else list(request.resumed.token_ids)
        longest = self.config.max_sequence_token_count - 1
        name = SequenceId(request.seed)
        self.salts[request.seed] = request.cache_salt
        scanner = None if pair is None else PairScanner(pair)
        if scanner is not None:
            assert scanner.push(begun) is None
        if len(request.prompt_token_ids) > longest:
            with pytest.raises(RequestTooLong, match=str(longest)):
                self.scheduler.add(name, request, scanner)
        elif len(self.live) >= self.config.max_sequence_count + self.config.max_waiting_count:
            with pytest.raises(QueueFull) as refused:
                self.scheduler.add(name, request, scanner)
            assert refused.value.retry_after > 0
        else:
            self.scheduler.add(name, request, scanner)
            self.requests[name] = request
            self.pairs[name] = pair
            self.outputs[name] = begun
            self.made[name] = [(self.weights.digest, False)] * len(begun)
            self.reached["resumed"] += bool(begun)
            self.resumed_count += len(begun)
            if request.output is OutputKind.HOLD:
                self.unmasked.add(name)
            with pytest.raises(AssertionError):
                self.scheduler.add(name, request, scanner)

    def allow(self, name: SequenceId) -> None:
        """The grammar says what may come next."""
        request = self.requests[name]
        tokens = [*request.prompt_token_ids, *self.outputs[name]]
        self.unmasked.remove(name)
        self.reached["unparked"] += name in self.scheduler.ledger.parked
        self.scheduler.sample(name, mask_of(request.seed, tokens))

    def send(self, faulty: int | None = None) -> Message | None:
        """The next message on its way to the worker, if there is one."""
        ledger = self.scheduler.ledger
        full = ledger.open_step_count >= self.config.max_inflight_step_count
        ready = set(ledger.ready)
        first = next((sequence for sequence in ledger.running if not sequence.held), None)
        fresh = first is not None and first.computed + first.ahead < first.token_limit - 1
        stages = self.config.pipeline_stage_count
        if stages > 1 and first is not None:
            fresh &= first.pending < MOST_PENDING
        last_steps = {one.row: one.last_step for one in ledger.running if one.caught_up}
        message = self.scheduler.next_message(self.now)
        self.loads += self.scheduler.adapters.take_loads()
        self.reached["closed slots"] += any(slot.is_closing for slot in ledger.adapters.slots)
        self.reached["beside adapters' waiters"] += bool(ledger.adapters.queues and message)
        if message is None:
            waiting = [s for s in ledger.waiting if s.completion_count or not ledger.is_closing]
            idle = not waiting and all(sequence.held for sequence in ledger.running)
            assert full or ledger.inflight or idle, "work, but no plan"
            return None
        self.sent.append((message, faulty))
        if isinstance(message, StepPlan):
            self.kept -= {SequenceId(added.seed) for added in message.added}
        if isinstance(message, SamplePlan):
            assert ready and message.rows
            self.reached["samples of several rows"] += len(message.rows) > 1
            self.reached["samples beside steps in flight"] += ledger.open_step_count > 0
        else:
            assert not full and not ready
            assert message.scheduled.rows or message.removed_rows
            if first is not None and fresh and first.row not in message.scheduled.rows:
                last = last_steps.get(first.row, -math.inf)
                older = [row for row in message.scheduled.rows if last_steps.get(row, last) < last]
                assert older or message.step_id - last < stages, "the first did not go on"
                assert message.scheduled.rows, "nobody went on"
                self.reached["turns of others"] += 1
            self._note(message)
        return message

    def answer_load(self, index: int = 0, *, fails: bool = False) -> None:
        """The worker answers a load, not always the oldest."""
        load = self.loads.pop(index % len(self.loads))
        if fails:
            for output in self.scheduler.adapters.refused(load, "the folder is gone"):
                self.take(output)
            return
        self.worker.load_adapter(load.slot, load.digest)
        self.scheduler.adapters.loaded(load)

    def execute(self) -> None:
        """The worker executes the oldest message that it has not executed."""
        message, faulty = self.sent.popleft()
        self.results.append(self.worker.execute(message, faulty))

    def oldest_result(self) -> StepResult:
        """The next to be delivered."""
        if not self.results:
            self.execute()
        return self.results[0]

    def deliver(self) -> None:
        result = self.oldest_result()
        self.results.popleft()
        self.reached["rows with several tokens"] += any(count > 1 for count in result.token_counts)
        self.reached["held beside sampled"] += bool(result.held_rows and result.rows)
        for output in self.scheduler.update(result):
            self.take(output)

    def take(self, output: SequenceOutput) -> None:
        name = output.sequence_id
        assert name not in self.reasons, "tokens for a request that was over"
        assert output.tokens.ids or output.finish
        self.outputs[name] += output.tokens.ids
        made = self.made[name]
        made += [(self.weights.digest, name in self.kept)] * len(output.tokens)
        self.reached["tokens of kept KV"] += name in self.kept and bool(output.tokens.ids)
        request = self.requests[name]
        longest = self.config.max_sequence_token_count
        digests = [*(digest for digest, _ in made), self.weights.digest]
        expected, reason = alone(request, self.pairs[name], longest, digests)
        got = self.outputs[name]
        if output.finish is None:
            assert got == expected[: len(got)] and len(got) < len(expected)
            if request.output is OutputKind.HOLD:
                self.unmasked.add(name)
            return
        finish = output.finish
        self.reasons[name] = finish.reason
        self.unmasked.discard(name)
        assert finish.usage.prompt_tokens == len(request.prompt_token_ids)
        assert finish.usage.completion_tokens == len(got)
        assert finish.spans == spans_of(made)
        self.reached["several weights"] += len({digest for digest, _ in made}) > 1
        computed = 0 if request.resumed is not None else 1  # the last one, at least
        cached = finish.usage.cached_prompt_tokens
        assert 0 <= cached <= len(request.prompt_token_ids) - computed
        if not self.cached:
            assert finish.usage.cached_prompt_tokens == 0
        if finish.reason is FinishReason.FAULT:
            assert "INVALID_LOGITS" in finish.detail
            self.interrupted.add(name)
        elif finish.reason is FinishReason.WEIGHTS_CHANGED:
            assert got and finish.detail
            self.interrupted.add(name)
        elif finish.reason is FinishReason.ADAPTER_UNAVAILABLE:
            assert request.adapter is not None and finish.detail
            self.interrupted.add(name)
        else:
            assert (got, finish.reason) == (expected, reason)
            own = request.stop.stop_token_ids
            by_string = tuple(got[-2:]) == self.pairs[name]
            is_own = got[-1] in own and not by_string
            assert finish.stop_token_id == (got[-1] if is_own else None)

    def finish(self, name: SequenceId, reason: FinishReason) -> None:
        finish = self.scheduler.finish(name, reason)
        assert finish is not None and finish.reason is reason
        assert finish.usage.completion_tokens == len(self.outputs[name])
        assert finish.spans == spans_of(self.made[name])
        self.reasons[name] = reason
        self.interrupted.add(name)
        self.unmasked.discard(name)
        assert self.scheduler.finish(name, reason) is None

    def resync(self, caching: bool, block_size: int) -> None:
        """Another worker, of as many KV tokens or a few more."""
        self.epoch += 1
        tokens = self.config.usable_block_count * self.config.block_size
        self.config = replace(
            self.config,
            enable_prefix_caching=caching,
            block_size=block_size,
            block_count=1 + -(-tokens // block_size),
        )
        self.cached |= caching
        self.worker = CheckingWorker(self.config, self.epoch, self.salts)
        self.worker.weights = self.weights
        self.sent.clear()
        self.results.clear()
        self.kept.clear()
        self.loads.clear()
        assert self.scheduler.resync(self.config, self.epoch, self.weights) == []

    def reconnect(self, executed_count: int) -> None:
        """The same worker after a broken connection, at which it had executed so many messages
        more whose results never came. It keeps its KV."""
        for _ in range(min(executed_count, len(self.sent))):
            self.execute()
        self.epoch += 1
        self.worker.attach(self.epoch)
        self.sent.clear()
        self.results.clear()
        self.kept.clear()
        for load in self.loads[:executed_count]:
            self.worker.load_adapter(load.slot, load.digest)
        self.loads.clear()
        outputs = self.scheduler.resync(
            self.config, self.epoch, self.weights, keep_kv=True, adapters=self.worker.adapters
        )
        assert outputs == []
        self.reached["reconnects with KV kept"] += len(self.scheduler.ledger.cache) > 0

    def switch(self, policy: InFlightPolicy, digest: str) -> None:
        """The worker gets other weights, once nothing is in flight."""
        while self.outstanding:
            self.deliver()
        if policy is InFlightPolicy.FINISH_ON_OLD:
            bound = 10_000
            while not self.scheduler.close():
                assert (bound := bound - 1) > 0, "those that have begun do not end"
                if self.send() is None and self.outstanding:
                    self.deliver()
                elif self.loads:
                    self.answer_load()
                elif not self.outstanding and self.unmasked:
                    self.allow(min(self.unmasked))
                invariants.check(self.scheduler)
            while self.outstanding:
                self.deliver()
        keeps = policy is InFlightPolicy.KEEP_KV
        held = {name for name, own in self.scheduler.ledger.sequences.items() if own.held}
        version = WeightVersion(self.weights.generation + 1, digest, f"name of {digest}")
        self.worker.commit(version, keep_kv=keeps)
        self.kept = {SequenceId(row.seed) for row in self.worker.rows.values()} - held
        self.kept &= set(self.live) if keeps else set()
        begun = {name for name in self.live if self.outputs[name]}
        outputs = self.scheduler.switch_weights(version, policy)
        for output in outputs:
            self.take(output)
        self.weights = version
        ended = {output.sequence_id for output in outputs}
        assert ended == (begun if policy is InFlightPolicy.ABORT else set())
        waiting = {own.sequence_id for own in self.scheduler.ledger.waiting}
        if policy is InFlightPolicy.CONTINUE_ON_NEW:
            assert not self.scheduler.ledger.running and waiting <= set(self.live)
        assert len(self.scheduler.ledger.cache) == 0
        self.reached[f"switched: {policy.value}"] += bool(begun)

    def drain(self) -> None:
        """To the end in bounded steps, with as many plans in flight as may be."""
        lengths = [len(self.requests[name].prompt_token_ids) for name in self.live]
        bound = 20 + 40 * (sum(lengths) + self.config.max_sequence_token_count * len(lengths))
        self.scheduler.close(is_closing=False)
        while self.scheduler.has_work:
            assert (bound := bound - 1) > 0, "requests do not end"
            while self.send() is not None:
                invariants.check(self.scheduler)
            if self.outstanding:
                self.deliver()
            elif self.loads:
                self.answer_load()
            else:
                assert self.unmasked, "nothing in flight, and nobody waits for a mask"
                self.allow(min(self.unmasked))
            invariants.check(self.scheduler)
        while self.loads:  # nobody waits for them any more
            self.answer_load()
        assert not len(self.scheduler.ledger.adapters)
        assert not self.live, "no work left, but a request is not over"
        assert not self.worker.rows, "an idle worker keeps rows"
        stats = self.scheduler.stats()
        outputs = sum(map(len, self.outputs.values()))
        assert stats.generated_tokens == outputs - self.resumed_count
        assert stats.submitted == len(self.requests) == sum(stats.finished.values())
        assert self.scheduler.next_message(self.now) is None
        if not self.interrupted:
            prompts = sum(len(request.prompt_token_ids) for request in self.requests.values())
            assert stats.prompt_tokens + stats.cached_prompt_tokens == prompts

    def _note(self, plan: StepPlan) -> None:
        columns, ledger = plan.scheduled, self.scheduler.ledger
        self.reached["drafts behind open drafts"] += any(columns.open_step_distances)
        self.reached["parked"] += bool(ledger.parked)
        if self.epoch > 1 and plan.step_id == 1:
            hits = any(sequence.computed_token_count for sequence in plan.added)
            self.reached["hits right after a reconnect"] += hits
