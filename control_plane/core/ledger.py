"""The scheduler's books: every live sequence, who holds which row and blocks, what is in flight.

Every method is one move that keeps the books balanced (see invariants): it moves the pool, the
cache, the lists and the counts together, and a sequence's own counters by that sequence's methods.
What should move is decided in planner.py and update.py.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from control_plane.core.adapters import AdapterSlots
from control_plane.core.admission import Admission
from control_plane.core.block_pool import BlockPool
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import Counters, Finish, FinishReason, Usage
from control_plane.core.plan import BlockId, Row, WeightVersion
from control_plane.core.prefix_cache import PrefixCache
from control_plane.core.ranked_list import RankedList
from control_plane.core.request import OutputKind, Request, SequenceId, StopScanner
from control_plane.core.sequence import NO_ROW, Sequence, SequenceState, rank_of
from control_plane.core.story import Story


@dataclass(slots=True, eq=False)
class InflightMessage:
    """What the result of a message must bring: tokens or a fault for each of `rows`, in order.

    Sequences are held themselves, not looked up by row: by the time the result comes, the row may
    be somebody else's.
    """

    step_id: int
    rows: list[Row]
    sequences: list[Sequence]
    """Those of `rows`."""
    draft_counts: list[int] = field(default_factory=list)
    """Drafts that each of `rows` verifies; empty: none does."""
    held_rows: list[Row] = field(default_factory=list)
    """Rows whose logits the step holds: the result brings their names and nothing else."""
    held: list[Sequence] = field(default_factory=list)
    """Those of `held_rows`."""
    chunks: list[tuple[Row, Sequence, int]] = field(default_factory=list)
    """Rows that compute tokens which they hold already, and the first position they compute."""
    is_step: bool = True
    """Whether the message is a StepPlan. A SamplePlan computes no KV."""

    def members(self) -> Iterator[tuple[Row, Sequence]]:
        """Every row of the message and its sequence; a row may come twice."""
        yield from zip(self.rows, self.sequences, strict=True)
        yield from zip(self.held_rows, self.held, strict=True)
        yield from ((row, sequence) for row, sequence, _ in self.chunks)


class Ledger:
    """All mutable state of a scheduler. The worker's part of it is replaced by `attach`."""

    def __init__(
        self,
        config: SchedulerConfig,
        epoch: int,
        weight_version: WeightVersion,
        adapters: Mapping[int, str] | None = None,
    ) -> None:
        self.sequences: dict[SequenceId, Sequence] = {}
        self.waiting = RankedList()
        self.running = RankedList()
        self.parked: dict[SequenceId, Sequence] = {}
        """Those that wait, but not for a row: they made room while they were held, and would only
        be held again before it is known which tokens are allowed."""
        self.suspects: dict[SequenceId, Sequence] = {}
        """Live ones that may have ended several claims, in the order of their trials."""
        self.convictions_in_row = 0
        self.tokens_at_conviction = 0
        """`counters.generated_tokens` at the last conviction."""
        self.appeals_in_row = 0
        self.tokens_at_appeal = 0
        """`counters.generated_tokens` at the last appeal."""
        self.kept: dict[SequenceId, Sequence] = {}
        """Live ones that go on over KV of other weights, or whose last tokens came of that."""
        self.is_closing = False
        """Nobody begins any more: whoever has not waits for other weights."""
        self.fruitless_ends = 0
        """Claims that ended over what ran, since the last token before the latest."""
        self.tokens_at_end = 0
        """`counters.generated_tokens` at the latest of these ends."""
        self.pinned: frozenset[str] = frozenset()
        """Digests of adapters that stay in their slots, once they are there."""
        self.counters = Counters()
        self.story = Story()
        self.attach(config, epoch, weight_version, keep_kv=False, adapters=adapters)

    def attach(
        self,
        config: SchedulerConfig,
        epoch: int,
        weight_version: WeightVersion,
        *,
        keep_kv: bool,
        adapters: Mapping[int, str] | None = None,
    ) -> None:
        """A worker without rows, and without KV unless it keeps it. Nobody may be running.

        `adapters`: the digests of those that it holds, by slot.
        """
        assert not self.running, "a running sequence would lose its row"
        if not keep_kv:
            self.cache = PrefixCache(
                config.block_size, weight_version.digest, config.enable_prefix_caching
            )
            self.pool = BlockPool(config.block_count, self.cache)
        self.config = config
        self.epoch = epoch
        self.weight_version = weight_version
        self.admission = Admission(config)
        self.last_step_id = 0
        self.answered_step_id = 0
        """The last step whose result has come; all before it have theirs."""
        self.inflight: deque[InflightMessage] = deque()
        self.ready: dict[SequenceId, Sequence] = {}
        """Held, and it is known which tokens are allowed: a SamplePlan may name them."""
        self.adapters = AdapterSlots(config.adapter_slot_count, self.waiting, adapters or {})
        self.free_rows = [Row(row) for row in range(config.max_sequence_count - 1, -1, -1)]
        self.released_rows: list[Row] = []
        """Free here, but still with a sequence on the worker until the next plan removes it."""

    @property
    def open_step_count(self) -> int:
        """Steps whose results are still to come."""
        return self.last_step_id - self.answered_step_id

    def enqueue(
        self, sequence_id: SequenceId, request: Request, scanner: StopScanner | None
    ) -> None:
        """A new sequence waits. It keeps the request but for its tokens, which become its log."""
        prompt_count = len(request.prompt_token_ids)
        resumed = request.resumed
        token_ids = array("I", request.prompt_token_ids)
        if resumed is not None:
            token_ids.extend(resumed.token_ids)
        sequence = Sequence(
            sequence_id=sequence_id,
            request=replace(request, prompt_token_ids=(), resumed=None),
            prompt_count=prompt_count,
            scanner=scanner,
            rank=rank_of(request, sequence_id, self.config.ageing_seconds),
            token_ids=token_ids,
            token_limit=self.admission.token_limit(prompt_count, request.stop.max_tokens),
            cache_root=b"",
            stop_ids=request.stop.stop_token_ids | request.stop.end_of_sequence_ids,
            watched=scanner is not None or request.output is OutputKind.HOLD,
        )
        sequence.cache_root = self.cache.root(request.cache_salt, sequence.adapter_digest)
        if resumed is not None:
            sequence.spans = resumed.made_by()
            if (origin := resumed.origin) is not None:
                sequence.arithmetic_changed = origin.arithmetic_changed
        self.counters.submitted += 1
        self.sequences[sequence_id] = sequence
        self._queue(sequence)
        if request.adapter is not None:
            self.counters.adapter_waits += sequence.awaits_adapter
            self.counters.adapter_hits += not sequence.awaits_adapter
        self.tell(sequence, "submitted")

    def withdraw(self, sequence: Sequence) -> Sequence:
        """Gives a live sequence away, and frees all it holds. Another ledger takes what it returns.

        Its tokens in flight are lost: whoever takes it computes them again.
        """
        self.drop_kept_kv(sequence)
        sequence.credited(self.weight_version)
        departed = sequence.departed()
        self._leave(sequence)
        self.counters.moved_out += 1
        self.tell(sequence, "moved away")
        return departed

    def adopt(self, sequence: Sequence) -> None:
        """Takes a sequence that another ledger has withdrawn. It waits, with the rank it had."""
        self.counters.moved_in += 1
        self.sequences[sequence.sequence_id] = sequence
        self.fit(sequence)
        self._queue(sequence)
        self.tell(sequence, "moved here")

    def fit(self, sequence: Sequence) -> None:
        """A sequence comes from another worker: what depends on that one is set anew."""
        request = sequence.request
        sequence.rank = rank_of(request, sequence.sequence_id, self.config.ageing_seconds)
        sequence.token_limit = self.admission.token_limit(
            sequence.prompt_count, request.stop.max_tokens
        )
        sequence.cache_root = self.cache.root(request.cache_salt, sequence.adapter_digest)
        sequence.block_hashes.clear()

    def start(self, sequence: Sequence, hits: list[BlockId]) -> None:
        """Gives a waiting sequence a row and its cached prefix."""
        assert not sequence.pending
        self.drop_kept_kv(sequence)
        self.waiting.remove(sequence)
        self.pool.share(hits)
        hit_count = len(hits) * self.config.block_size
        cached = min(hit_count, sequence.prompt_count)
        self.counters.cached_prompt_tokens += max(0, cached - sequence.furthest)
        sequence.started(self.free_rows.pop(), hits, hit_count)
        if sequence.request.adapter is not None:
            sequence.adapter_slot = self.adapters.use(sequence.adapter_digest)
        self.running.add(sequence)
        self.tell(sequence, f"started in row {sequence.row}, {hit_count} tokens cached")

    def grow(self, sequence: Sequence, count: int) -> list[BlockId]:
        """Appends blocks, which the caller knows to be free, to a block table. Returns them."""
        blocks = self.pool.allocate(count)
        sequence.grown(blocks, count * self.config.block_size)
        return blocks

    def allow(self, sequence: Sequence, mask: bytes) -> None:
        """It is known which tokens may come next in a sequence that holds."""
        assert sequence.holds, f"sequence {sequence.sequence_id} is not constrained"
        assert sequence.mask is None and sequence.sent_mask is None, "told twice for one token"
        sequence.mask = mask
        if sequence.held:
            self.ready[sequence.sequence_id] = sequence
        elif self.parked.pop(sequence.sequence_id, None) is not None:
            self._queue(sequence)

    def release(self, sequence: Sequence) -> None:
        """A SamplePlan names a ready sequence: it may go on behind that."""
        del self.ready[sequence.sequence_id]
        sequence.released()

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the queue, without row and blocks.

        Its full blocks stay cached for as long as nobody needs them. Tokens of it that are in
        flight are accepted when they come; until then it is not started again.
        """
        self.cache.register(sequence)
        self.start_over(sequence, "preempted")
        self.counters.preemptions += 1

    def start_over(self, sequence: Sequence, event: str) -> None:
        """A running sequence waits again, without row and blocks."""
        parks = sequence.held and sequence.mask is None
        self._vacate(sequence, SequenceState.WAITING)
        if parks:
            self.parked[sequence.sequence_id] = sequence
        else:
            self._queue(sequence)
        self.tell(sequence, event)

    def drop_kept_kv(self, sequence: Sequence) -> None:
        """What it gets from now on comes of no KV of other weights: it has none any more."""
        if self.kept.pop(sequence.sequence_id, None) is not None:
            sequence.credited(self.weight_version)
            sequence.keeps_kv = False

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_token_id: int | None = None,
        detail: str = "",
    ) -> Finish:
        """Frees all that a live sequence holds, at once. Tokens in flight will find it over."""
        if reason is FinishReason.FAULT:
            # What computed an invalid result may have left invalid KV: nobody shall hit it.
            for block in sequence.blocks:
                self.cache.forget(block)
            sequence.registered = len(sequence.blocks)
        sequence.credited(self.weight_version)
        self._leave(sequence)
        self.counters.finished[reason] += 1
        self.tell(sequence, f"over: {reason.value}")
        usage = Usage(
            prompt_tokens=sequence.prompt_count,
            cached_prompt_tokens=sequence.cached_prompt_count or 0,
            completion_tokens=sequence.completion_count,
        )
        return Finish(
            reason,
            usage,
            stop_token_id,
            detail,
            sequence.arithmetic_changed,
            sequence.started_at,
            sequence.spans,
        )

    def lose_worker(self, *, keep_kv: bool) -> None:
        """Rows and steps in flight are gone; the token logs are what is left.

        With `keep_kv` the cache keeps what answered steps wrote, and gets what they wrote of
        running sequences. Steps in flight may have run or not: what they wrote is dropped.
        """
        if keep_kv:
            self.pool.drop_since(self.answered_step_id + 1)
            for sequence in self.running:
                sequence.rewound()
                self.cache.register(sequence)
        self.inflight.clear()
        while self.running:
            sequence = self.running.last
            self._vacate(sequence, SequenceState.WAITING)
            sequence.missing = len(sequence.token_ids)
            self.waiting.add(sequence)
            self.tell(sequence, "lost its worker")
        for sequence in self.parked.values():
            sequence.missing = len(sequence.token_ids)
            self.waiting.add(sequence)
        self.parked.clear()
        for sequence in self.adapters.dismiss():
            sequence.missing = len(sequence.token_ids)
            self.waiting.add(sequence)
        for sequence in self.waiting:
            self.drop_kept_kv(sequence)
            sequence.lost()

    def tell(self, sequence: Sequence, event: str) -> None:
        self.story.tell(sequence.sequence_id, self.last_step_id, event)

    def _queue(self, sequence: Sequence) -> None:
        """A sequence waits. Its hits are looked up now: the memo of its hashes is used again."""
        hits = len(self.cache.lookup(sequence)) * self.config.block_size
        sequence.missing = len(sequence.token_ids) - hits
        self.adapters.enlist(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """A live sequence is no longer here; what it computed stays cached."""
        if sequence.row != NO_ROW:
            self.cache.register(sequence)
            self._vacate(sequence, SequenceState.OVER)
        else:
            if self.parked.pop(sequence.sequence_id, None) is None:
                self.adapters.unlist(sequence)
            sequence.state = SequenceState.OVER
        del self.sequences[sequence.sequence_id]
        self.suspects.pop(sequence.sequence_id, None)
        self.kept.pop(sequence.sequence_id, None)

    def _vacate(self, sequence: Sequence, state: SequenceState) -> None:
        """Off the running list, out of its row and blocks; what is cached stays cached."""
        self.running.remove(sequence)
        self.ready.pop(sequence.sequence_id, None)
        self.pool.release(sequence.blocks)
        self.free_rows.append(sequence.row)
        self.released_rows.append(sequence.row)
        if sequence.adapter_slot:
            self.adapters.release(sequence.adapter_slot, self.last_step_id + 1)
            sequence.adapter_slot = 0
        sequence.vacated(state)
