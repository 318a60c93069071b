"""The scheduler's books: every live sequence, who holds which row and blocks, what is in flight.

Only moves between states, each of which keeps the books balanced (see invariants). What should move
is decided in scheduler.py and update.py.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass

from control_plane.core.admission import Admission
from control_plane.core.block_pool import BlockPool
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import Finish, FinishReason, Usage
from control_plane.core.plan import BlockId, Row, WeightVersion
from control_plane.core.prefix_cache import PrefixCache
from control_plane.core.ranked_list import RankedList
from control_plane.core.request import Request, RequestId
from control_plane.core.sequence import NO_ROW, Sequence, SequenceState, rank_of
from control_plane.core.stats import Counters
from control_plane.core.story import Story


@dataclass(frozen=True, slots=True)
class InflightStep:
    """What the result of a plan must bring: a token or a fault for each of these rows, in order.

    Sequences are held themselves, not looked up by row: by the time the result comes, the row may
    be somebody else's.
    """

    step_id: int
    rows: list[Row]
    sequences: list[Sequence]


class Ledger:
    """All mutable state of a scheduler. The worker's part of it is replaced by `attach`."""

    def __init__(self, config: SchedulerConfig, epoch: int, weight_version: WeightVersion) -> None:
        self.sequences: dict[RequestId, Sequence] = {}
        self.waiting = RankedList()
        self.running = RankedList()
        self.counters = Counters()
        self.story = Story()
        self.attach(config, epoch, weight_version)

    def attach(self, config: SchedulerConfig, epoch: int, weight_version: WeightVersion) -> None:
        """A worker that holds nothing: its rows and blocks are all free. Nobody may be running."""
        assert not self.running, "a running sequence would lose its row"
        self.config = config
        self.epoch = epoch
        self.weight_version = weight_version
        self.admission = Admission(config)
        self.cache = PrefixCache(
            config.block_size, weight_version.digest, config.enable_prefix_caching
        )
        self.pool = BlockPool(config.block_count, self.cache)
        self.last_step_id = 0
        self.inflight: deque[InflightStep] = deque()
        self.free_rows = [Row(row) for row in range(config.max_sequence_count - 1, -1, -1)]
        self.released_rows: list[Row] = []
        """Free here, but still with a sequence on the worker until the next plan removes it."""

    def enqueue(self, request: Request) -> None:
        sequence = Sequence(
            request=request,
            rank=rank_of(request, self.counters.submitted, self.config.ageing_seconds),
            token_ids=array("I", request.prompt_token_ids),
            token_limit=self.admission.token_limit(request),
            cache_root=self.cache.root(request.cache_salt),
            stop_ids=request.stop.stop_token_ids | request.stop.end_of_sequence_ids,
        )
        self.counters.submitted += 1
        self.sequences[request.request_id] = sequence
        self.waiting.add(sequence)
        self.tell(sequence, "submitted")

    def start(self, sequence: Sequence, hits: list[BlockId]) -> None:
        """Gives the first waiting sequence a row and its cached prefix."""
        assert sequence is self.waiting.first and not sequence.pending
        self.waiting.remove(sequence)
        self.pool.share(hits)
        hit_count = len(hits) * self.config.block_size
        sequence.state = SequenceState.RUNNING
        sequence.row = self.free_rows.pop()
        sequence.blocks = hits
        sequence.capacity = sequence.computed = hit_count
        sequence.registered = len(hits)
        self.running.add(sequence)
        cached = min(hit_count, sequence.prompt_count)
        self.counters.cached_prompt_tokens += max(0, cached - sequence.furthest)
        if sequence.cached_prompt_count is None:
            sequence.cached_prompt_count = cached
        sequence.furthest = max(sequence.furthest, hit_count)
        self.tell(sequence, f"started in row {sequence.row}, {hit_count} tokens cached")

    def grow(self, sequence: Sequence, count: int) -> list[BlockId]:
        """Appends blocks, which the caller knows to be free, to a block table. Returns them."""
        blocks = self.pool.allocate(count)
        sequence.blocks += blocks
        sequence.capacity += count * self.config.block_size
        return blocks

    def preempt_last(self) -> None:
        """Sends the running sequence of the last rank back to the queue, without row and blocks.

        Its full blocks stay cached for as long as nobody needs them. Tokens of it that are in
        flight are accepted when they come; until then it is not started again.
        """
        sequence = self.running.last
        self._vacate(sequence)
        sequence.state = SequenceState.WAITING
        self.waiting.add(sequence)
        self.counters.preemptions += 1
        self.tell(sequence, "preempted")

    def end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        stop_token_id: int | None = None,
        detail: str = "",
    ) -> Finish:
        """Frees all that a live sequence holds, at once. Tokens in flight will find it over."""
        if sequence.state is SequenceState.RUNNING:
            if reason is FinishReason.FAULT:
                # What computed an invalid result may have left invalid KV: nobody shall hit it.
                for block in sequence.blocks:
                    self.cache.forget(block)
                sequence.registered = len(sequence.blocks)
            self._vacate(sequence)
        else:
            self.waiting.remove(sequence)
        sequence.state = SequenceState.OVER
        del self.sequences[sequence.request.request_id]
        self.counters.finished[reason] += 1
        self.tell(sequence, f"over: {reason.value}")
        usage = Usage(
            prompt_tokens=sequence.prompt_count,
            cached_prompt_tokens=sequence.cached_prompt_count or 0,
            completion_tokens=sequence.completion_count,
        )
        return Finish(reason, usage, stop_token_id, detail)

    def lose_worker(self) -> None:
        """What was on the worker or in flight is gone; the token logs are what is left."""
        self.inflight.clear()
        while self.running:
            sequence = self.running.last
            self._vacate(sequence)
            sequence.state = SequenceState.WAITING
            self.waiting.add(sequence)
            self.tell(sequence, "lost its worker")
        for sequence in self.waiting:
            sequence.pending = 0

    def tell(self, sequence: Sequence, event: str) -> None:
        self.story.tell(sequence.request.request_id, self.last_step_id, event)

    def _vacate(self, sequence: Sequence) -> None:
        """Off the running list, out of its row and blocks; what is worth it stays cached."""
        self.running.remove(sequence)
        self.cache.register(sequence)
        self.pool.release(sequence.blocks)
        self.free_rows.append(sequence.row)
        self.released_rows.append(sequence.row)
        sequence.furthest = max(sequence.furthest, sequence.computed)
        sequence.row = NO_ROW
        sequence.blocks = []
        sequence.capacity = sequence.computed = 0
        sequence.caught_up = False
