"""The scheduler's books: every live sequence, who holds which row and blocks, what is in flight.

Every method is one move that keeps the books balanced (see invariants): it moves the pool, the
cache, the lists and the counts together, and a sequence's own counters by that sequence's methods.
What should move is decided in scheduler.py and update.py.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, replace

from control_plane.core.admission import Admission
from control_plane.core.block_pool import BlockPool
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import Counters, Finish, FinishReason, Usage
from control_plane.core.plan import BlockId, Row, WeightVersion
from control_plane.core.prefix_cache import PrefixCache
from control_plane.core.ranked_list import RankedList
from control_plane.core.request import Request, SequenceId, StopScanner
from control_plane.core.sequence import Sequence, SequenceState, rank_of
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
        self.sequences: dict[SequenceId, Sequence] = {}
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

    def enqueue(
        self, sequence_id: SequenceId, request: Request, scanner: StopScanner | None
    ) -> None:
        """A new sequence waits. It keeps the request but for the prompt, which becomes its log."""
        prompt_count = len(request.prompt_token_ids)
        sequence = Sequence(
            sequence_id=sequence_id,
            request=replace(request, prompt_token_ids=()),
            prompt_count=prompt_count,
            scanner=scanner,
            rank=rank_of(request, self.counters.submitted, self.config.ageing_seconds),
            token_ids=array("I", request.prompt_token_ids),
            token_limit=self.admission.token_limit(prompt_count, request.stop.max_tokens),
            cache_root=self.cache.root(request.cache_salt),
            stop_ids=request.stop.stop_token_ids | request.stop.end_of_sequence_ids,
        )
        self.counters.submitted += 1
        self.sequences[sequence_id] = sequence
        self.waiting.add(sequence)
        self.tell(sequence, "submitted")

    def start(self, sequence: Sequence, hits: list[BlockId]) -> None:
        """Gives the first waiting sequence a row and its cached prefix."""
        assert sequence is self.waiting.first and not sequence.pending
        self.waiting.remove(sequence)
        self.pool.share(hits)
        hit_count = len(hits) * self.config.block_size
        cached = min(hit_count, sequence.prompt_count)
        self.counters.cached_prompt_tokens += max(0, cached - sequence.furthest)
        sequence.started(self.free_rows.pop(), hits, hit_count)
        self.running.add(sequence)
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
        self._vacate(sequence, SequenceState.WAITING)
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
            self._vacate(sequence, SequenceState.OVER)
        else:
            self.waiting.remove(sequence)
            sequence.state = SequenceState.OVER
        del self.sequences[sequence.sequence_id]
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
            self._vacate(sequence, SequenceState.WAITING)
            self.waiting.add(sequence)
            self.tell(sequence, "lost its worker")
        for sequence in self.waiting:
            sequence.lost()

    def tell(self, sequence: Sequence, event: str) -> None:
        self.story.tell(sequence.sequence_id, self.last_step_id, event)

    def _vacate(self, sequence: Sequence, state: SequenceState) -> None:
        """Off the running list, out of its row and blocks; what is worth it stays cached."""
        self.running.remove(sequence)
        self.cache.register(sequence)
        self.pool.release(sequence.blocks)
        self.free_rows.append(sequence.row)
        self.released_rows.append(sequence.row)
        sequence.vacated(state)
