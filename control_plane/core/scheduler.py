"""Which tokens the next step computes. Pure: no clock, no I/O, nothing but the ledger changes.

There is no prefill phase and no decode phase. A step lets every scheduled sequence's computed
tokens catch up with its tokens, under one token budget (the rule of vLLM V1,
`vllm/v1/core/sched/scheduler.py`). Who runs comes before who waits, each in order of rank; a long
prompt leaves one token to every running sequence behind it, so it cannot hold up their output.

With several steps in flight a plan is made before the results of those before it. A row's next
token is then named by the step that samples it. If a result shows that a sequence had ended, its
tokens of later steps are dropped when they come.
"""

from __future__ import annotations

from control_plane.core import update
from control_plane.core.config import SchedulerConfig
from control_plane.core.events import Finish, FinishReason, SequenceOutput, Stats
from control_plane.core.ledger import InflightStep, Ledger
from control_plane.core.plan import (
    AddedSequence,
    OutputKind,
    Row,
    ScheduledRows,
    StepPlan,
    StepResult,
    WeightVersion,
)
from control_plane.core.request import Request, SequenceId, StopScanner
from control_plane.core.sequence import Sequence, rank_of
from control_plane.core.tokens import Tokens


class _Draft:
    """A plan in the making."""

    __slots__ = ("added", "budget", "chunked", "columns", "sampled", "sampled_rows", "step_id")

    def __init__(self, step_id: int, budget: int) -> None:
        self.step_id = step_id
        self.budget = budget
        self.added: list[AddedSequence] = []
        self.columns = ScheduledRows()
        self.sampled: list[Sequence] = []
        self.sampled_rows: list[Row] = []
        self.chunked: list[Sequence] = []
        """Those whose new full blocks are registered once the plan is complete."""


class Scheduler:
    """Decides, step by step, what one worker runs. Every method runs to completion at once."""

    def __init__(self, config: SchedulerConfig, epoch: int, weight_version: WeightVersion) -> None:
        self._ledger = Ledger(config, epoch, weight_version)

    @property
    def ledger(self) -> Ledger:
        """The books, for checks and tests; to be read only."""
        return self._ledger

    @property
    def has_work(self) -> bool:
        """Whether a plan can be made now or after the results in flight."""
        ledger = self._ledger
        return bool(ledger.sequences or ledger.inflight or ledger.released_rows)

    @property
    def inflight_count(self) -> int:
        """Plans whose results are still to come."""
        return len(self._ledger.inflight)

    def add(
        self, sequence_id: SequenceId, request: Request, scanner: StopScanner | None = None
    ) -> None:
        """Queues a sequence of a request. Raises RequestTooLong or QueueFull.

        `sequence_id` was never used before. `scanner` is asked about each step's tokens, already
        cut at the first stop token and the limit, before they are handed out. Where it finds a stop
        string complete, the sequence ends with STOP, even when the same token would have ended it
        otherwise.
        """
        assert sequence_id not in self._ledger.sequences, f"sequence {sequence_id} exists"
        self._ledger.admission.check(request, len(self._ledger.waiting))
        self._ledger.enqueue(sequence_id, request, scanner)

    def finish(self, sequence_id: SequenceId, reason: FinishReason) -> Finish | None:
        """Ends a sequence from outside, e.g. cancelled. Frees all it holds at once.

        None when the sequence is unknown or already over.
        """
        sequence = self._ledger.sequences.get(sequence_id)
        return None if sequence is None else self._ledger.end(sequence, reason)

    def update(self, result: StepResult) -> list[SequenceOutput]:
        """Takes the result of the oldest plan in flight. Raises ResultMismatch for any other."""
        return update.apply_result(self._ledger, result)

    def resync(
        self, config: SchedulerConfig, epoch: int, weight_version: WeightVersion
    ) -> list[SequenceOutput]:
        """The worker was lost or replaced: plans in flight are forgotten, everybody starts again.

        Running sequences go back to the queue with their token logs and ranks; blocks, rows and
        prefix cache start empty, step ids at 1. The result is empty unless the new worker holds
        shorter sequences than the old one did: a sequence that is longer already ends here.
        """
        ledger = self._ledger
        ledger.lose_worker()
        ledger.attach(config, epoch, weight_version)
        sequences = list(ledger.waiting)
        for serial, sequence in enumerate(sequences, start=-len(sequences)):
            request = sequence.request
            sequence.rank = rank_of(request, serial, config.ageing_seconds)
            sequence.token_limit = ledger.admission.token_limit(
                sequence.prompt_count, request.stop.max_tokens
            )
            sequence.cache_root = ledger.cache.root(request.cache_salt)
            sequence.block_hashes.clear()
        ledger.waiting.reorder()
        return [
            SequenceOutput(
                sequence.sequence_id, Tokens([]), ledger.end(sequence, FinishReason.LENGTH)
            )
            for sequence in sequences
            if len(sequence.token_ids) >= sequence.token_limit
        ]

    def stats(self) -> Stats:
        """A snapshot of loads and counters."""
        ledger = self._ledger
        pool, counters, block_size = ledger.pool, ledger.counters, ledger.config.block_size
        return Stats(
            running=len(ledger.running),
            waiting=len(ledger.waiting),
            inflight=len(ledger.inflight),
            kv_active_tokens=pool.referenced_count * block_size,
            kv_cached_tokens=pool.idle_count * block_size,
            kv_free_tokens=(pool.free_count - pool.idle_count) * block_size,
            submitted=counters.submitted,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            cached_prompt_tokens=counters.cached_prompt_tokens,
            recomputed_tokens=counters.recomputed_tokens,
            generated_tokens=counters.generated_tokens,
            finished=dict(counters.finished),
        )

    def story(self, sequence_id: SequenceId) -> list[str]:
        """The sequence's last changes of state, oldest first; bounded over all sequences."""
        return self._ledger.story.of([sequence_id])

    # --- planning -----------------------------------------------------------------------------

    def schedule(self, now: float) -> StepPlan | None:
        """The next plan, to be sent before the next call. None: nothing to do, or too many ahead.

        Whenever no plan is in flight and a request is live, there is a plan with rows to run: the
        sequence of the first rank can always go on. With no request left, a last plan gives back
        the rows.
        """
        ledger = self._ledger
        if len(ledger.inflight) >= ledger.config.max_inflight_step_count:
            return None
        draft = _Draft(ledger.last_step_id + 1, ledger.config.max_step_token_count)
        preemptions = ledger.counters.preemptions
        self._schedule_running(draft)
        if ledger.counters.preemptions == preemptions:
            self._schedule_waiting(draft, now)
        if not draft.columns.rows and (ledger.inflight or not ledger.released_rows):
            return None
        # Registered only now: a hit within the plan would read what this very step writes.
        for sequence in draft.chunked:
            ledger.cache.register(sequence)
        ledger.last_step_id = draft.step_id
        ledger.inflight.append(InflightStep(draft.step_id, draft.sampled_rows, draft.sampled))
        removed_rows, ledger.released_rows = ledger.released_rows, []
        return StepPlan(
            epoch=ledger.epoch,
            step_id=draft.step_id,
            weight_version=ledger.weight_version,
            removed_rows=removed_rows,
            added=draft.added,
            scheduled=draft.columns,
        )

    def _schedule_running(self, draft: _Draft) -> None:
        """One token for whoever has caught up, a chunk for whoever has not.

        This loop runs for every row in every step: it is long so that it is flat.
        """
        ledger = self._ledger
        running = ledger.running.items
        step_id, budget, columns = draft.step_id, draft.budget, draft.columns
        add_row, add_start = columns.rows.append, columns.start_positions.append
        add_count, add_distance = columns.token_counts.append, columns.source_step_distances.append
        add_literal_count = columns.literal_token_counts.append
        add_literal = columns.literal_tokens.append
        add_appended_count = columns.appended_block_counts.append
        add_sampled, add_sampled_row = draft.sampled.append, draft.sampled_rows.append
        # Preemption shortens the list from its end while we walk it, never up to where we are.
        for index, sequence in enumerate(running):
            if budget <= 0:
                break
            if not sequence.caught_up:
                draft.budget = budget
                behind = len(running) - index - 1
                self._schedule_chunk(draft, sequence, index, max(1, budget - behind))
                budget = draft.budget
                continue
            start = sequence.computed
            if start == sequence.token_limit - 1:
                continue  # its last token is in flight
            if start == sequence.capacity:
                # All its blocks are full, and written by earlier plans than this one.
                ledger.cache.register(sequence)
                if not self._make_room(index, 1):
                    continue
                columns.appended_blocks.extend(ledger.grow(sequence, 1))
                add_appended_count(1)
            else:
                add_appended_count(0)
            row = sequence.row
            add_row(row)
            add_start(start)
            add_count(1)
            if sequence.pending:
                add_distance(step_id - sequence.last_step)
                add_literal_count(0)
                sequence.pending += 1
            else:
                add_distance(0)
                add_literal_count(1)
                add_literal(sequence.token_ids[start])
                sequence.pending = 1
            sequence.computed = start + 1
            sequence.last_step = step_id
            add_sampled(sequence)
            add_sampled_row(row)
            budget -= 1
        draft.budget = budget

    def _schedule_waiting(self, draft: _Draft, now: float) -> None:
        """Starts sequences in order of rank while there are budget, rows and blocks.

        The first that cannot start holds up the rest, else the large would starve. A sequence
        starts when blocks are free for all its tokens, and one more for every running sequence to
        grow into: with less, it would soon be preempted again.
        """
        ledger = self._ledger
        waiting, running, pool = ledger.waiting, ledger.running, ledger.pool
        block_size = ledger.config.block_size
        while draft.budget > 0 and waiting and ledger.free_rows:
            sequence = waiting.first
            if sequence.pending:
                break
            hits = ledger.cache.lookup(sequence)
            wanted = -(-len(sequence.token_ids) // block_size) - len(hits)
            if wanted + len(running) > pool.free_count - pool.count_idle(hits):
                break
            ledger.start(sequence, hits)
            ledger.admission.note_start(now)
            draft.added.append(
                AddedSequence(
                    row=sequence.row,
                    token_ids=sequence.token_ids[:],
                    prompt_token_count=sequence.prompt_count,
                    sampling=sequence.request.sampling,
                    seed=sequence.request.seed,
                    output=OutputKind.SAMPLE,
                    block_ids=list(hits),  # the blocks of the first chunk come as appended ones
                    computed_token_count=sequence.computed,
                )
            )
            self._schedule_chunk(draft, sequence, len(running), draft.budget)

    def _schedule_chunk(self, draft: _Draft, sequence: Sequence, index: int, most: int) -> None:
        """Up to `most` tokens of a sequence whose tokens the worker's row holds already.

        `index` is its place among the running ones; only those behind make room for it. When even
        that is not enough it takes what room there is, possibly none.
        """
        ledger, columns = self._ledger, draft.columns
        block_size = ledger.config.block_size
        start, known = sequence.computed, len(sequence.token_ids)
        end = min(known, start + most)
        wanted = -(-(end - sequence.capacity) // block_size)
        if wanted > 0 and not self._make_room(index, wanted):
            wanted = ledger.pool.free_count
            end = min(end, sequence.capacity + wanted * block_size)
            if end == start:
                return
        wanted = max(wanted, 0)
        columns.rows.append(sequence.row)
        columns.start_positions.append(start)
        columns.token_counts.append(end - start)
        columns.source_step_distances.append(0)
        columns.literal_token_counts.append(0)
        columns.appended_block_counts.append(wanted)
        columns.appended_blocks.extend(ledger.grow(sequence, wanted))
        sequence.planned(draft.step_id, end)
        draft.budget -= end - start
        draft.chunked.append(sequence)
        if end == known:
            sequence.sampled()
            draft.sampled.append(sequence)
            draft.sampled_rows.append(sequence.row)
        counters = ledger.counters
        counters.recomputed_tokens += max(0, min(end, sequence.furthest) - start)
        fresh_start = max(start, sequence.furthest)
        counters.prompt_tokens += max(0, min(end, sequence.prompt_count) - fresh_start)

    def _make_room(self, index: int, count: int) -> bool:
        """Preempts from the end, never the running sequence at `index`, until blocks are free.

        False: there are too few although nobody ranks behind. Then the sequence waits a step with
        what it has; those before it go on and, if need be, take it from there.
        """
        ledger = self._ledger
        while ledger.pool.free_count < count:
            if len(ledger.running) <= index + 1:
                return False
            ledger.preempt_last()
        return True
