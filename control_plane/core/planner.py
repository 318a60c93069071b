"""Which tokens the next step computes. Pure: no clock, no I/O, nothing but the ledger changes.

There is no prefill phase and no decode phase. A step lets every scheduled sequence's computed
tokens catch up with its tokens, under one token budget (the rule of vLLM V1,
`vllm/v1/core/sched/scheduler.py`). Who runs comes before who waits, each in order of rank; a long
prompt leaves one token to every running sequence behind it, so it cannot hold up their output.

With several steps in flight a plan is made before the results of those before it. A row's next
token is then named by the step that samples it. If a result shows that a sequence had ended, its
tokens of later steps are dropped when they come. Where a step in flight verifies drafts, a plan
starts its row at the least position that is possible and says which steps are open; the worker
knows how many drafts they accepted (docs/adr/0009).
"""

from __future__ import annotations

from collections.abc import Collection

from control_plane.core.ledger import InflightMessage, Ledger
from control_plane.core.plan import (
    AddedSequence,
    BlockId,
    GrammarMasks,
    Row,
    SamplePlan,
    ScheduledRows,
    StepPlan,
)
from control_plane.core.room import can_start
from control_plane.core.sequence import Sequence, SequenceState
from control_plane.core.suspicion import next_suspect
from control_plane.core.turns import MOST_PENDING, resting, without

_MAX_MASK_BYTES = 4 * 1024 * 1024
"""Of one SamplePlan: the masks of some 200 rows of a large vocabulary."""


def plan_step(ledger: Ledger, now: float) -> StepPlan | None:
    """The next plan, noted in the ledger as in flight; None: nothing to do.

    Where nothing is in flight and yet nobody can go on, although somebody is not held, held
    sequences are in the way. Those of the last ranks make room, one after another.

    While there are suspects, the plan has one of them and nobody else, and nothing else is in
    flight.
    """
    if ledger.suspects:
        if ledger.inflight:
            return None
        suspect = next_suspect(ledger)
        if suspect is not None:
            return _plan_trial(ledger, suspect, now)
    while True:
        planner = _Planner(ledger)
        planner.fill(now)
        if planner.columns.rows or ledger.inflight or not _park_last_held(ledger):
            break
    if not planner.columns.rows and (ledger.inflight or not ledger.released_rows):
        return None
    return planner.finish()


def _plan_trial(ledger: Ledger, suspect: Sequence, now: float) -> StepPlan | None:
    """The next step of a suspect, which has the worker to itself: everybody else makes room."""
    for sequence in list(ledger.running):
        if sequence is not suspect:
            ledger.preempt(sequence)
    planner = _Planner(ledger)
    if suspect.awaits_adapter:
        return planner.finish() if ledger.released_rows else None
    planner.fill_alone(suspect, now)
    assert planner.columns.rows, "a sequence that runs alone can always go on"
    return planner.finish()


def plan_sample(ledger: Ledger) -> SamplePlan | None:
    """The sampling of those rows that one step holds and whose masks are known.

    Noted in the ledger as in flight; None: there are none.
    """
    if not ledger.ready:
        return None
    step_id = next(iter(ledger.ready.values())).last_step
    sequences: list[Sequence] = []
    mask_bytes = 0
    for sequence in ledger.ready.values():
        if sequence.last_step == step_id:
            mask_bytes += len(sequence.mask or b"")
            if sequences and mask_bytes > _MAX_MASK_BYTES:
                break  # the next message brings them
            sequences.append(sequence)
    rows = [sequence.row for sequence in sequences]
    masked = [(sequence.row, sequence.mask) for sequence in sequences if sequence.mask]
    masks = None
    if masked:
        masks = GrammarMasks([row for row, _ in masked], b"".join(mask for _, mask in masked))
    for sequence in sequences:
        ledger.release(sequence)
    ledger.inflight.append(InflightMessage(step_id, rows, sequences, is_step=False))
    return SamplePlan(ledger.epoch, step_id, rows, masks)


def _park_last_held(ledger: Ledger) -> bool:
    """Takes row and blocks from the last running sequence that is held, if that helps anybody."""
    held = [sequence for sequence in ledger.running if sequence.held]
    if not held or (len(held) == len(ledger.running) and not ledger.waiting):
        return False
    ledger.preempt(held[-1])
    return True


class _Planner:
    """One plan in the making."""

    __slots__ = (
        "added",
        "added_token_count",
        "budget",
        "chunks",
        "columns",
        "draft_counts",
        "held",
        "held_rows",
        "ledger",
        "max_draft_count",
        "sampled",
        "sampled_rows",
        "step_id",
    )

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.step_id = ledger.last_step_id + 1
        self.budget = ledger.config.max_step_token_count
        self.max_draft_count = ledger.config.max_draft_token_count
        self.added: list[AddedSequence] = []
        self.added_token_count = 0
        self.columns = ScheduledRows()
        self.sampled: list[Sequence] = []
        self.sampled_rows: list[Row] = []
        self.draft_counts: list[int] = []
        """Of the sampled rows; empty where there is no drafter."""
        self.held: list[Sequence] = []
        self.held_rows: list[Row] = []
        self.chunks: list[tuple[Row, Sequence, int]] = []
        """Whose new full blocks are registered once the plan is complete, and their starts."""

    def fill(self, now: float) -> None:
        """Schedules who runs, and who waits unless room had to be made."""
        preemptions = self.ledger.counters.preemptions
        others = resting(self.ledger, self.step_id)
        self._schedule_running(others)
        if others and not self.columns.rows:  # those whose turn it is have no room
            self._schedule_running([each for each in others if each.pending >= MOST_PENDING])
        if self.ledger.counters.preemptions == preemptions:
            self._schedule_waiting(now)

    def fill_alone(self, sequence: Sequence, now: float) -> None:
        """Schedules one sequence; nobody else may be running."""
        if sequence.state is SequenceState.RUNNING:
            self._schedule_running()
        else:
            self._start(sequence, self.ledger.cache.lookup(sequence), now)

    def finish(self) -> StepPlan:
        """The plan, which is in flight from now on."""
        ledger = self.ledger
        # Registered only now: a hit within the plan would read what this very step writes.
        for _, sequence, _ in self.chunks:
            ledger.cache.register(sequence)
        ledger.last_step_id = self.step_id
        ledger.inflight.append(
            InflightMessage(
                step_id=self.step_id,
                rows=self.sampled_rows,
                sequences=self.sampled,
                draft_counts=self.draft_counts,
                held_rows=self.held_rows,
                held=self.held,
                chunks=self.chunks,
            )
        )
        removed_rows, ledger.released_rows = ledger.released_rows, []
        return StepPlan(
            epoch=ledger.epoch,
            step_id=self.step_id,
            weight_version=ledger.weight_version,
            removed_rows=removed_rows,
            added=self.added,
            scheduled=self.columns,
        )

    def _schedule_running(self, others: Collection[Sequence] = ()) -> None:
        """One token for whoever has caught up and is none of `others`, a chunk for whoever has not.

        This loop runs for every row in every step: it is long so that it is flat. What it does to a
        steady sequence is what `_schedule_last` does, where there are neither drafts nor holds.
        """
        ledger = self.ledger
        running = ledger.running.items
        step_id, budget, columns = self.step_id, self.budget, self.columns
        add_row, add_start = columns.rows.append, columns.start_positions.append
        add_count, add_distance = columns.token_counts.append, columns.source_step_distances.append
        add_literal_count = columns.literal_token_counts.append
        add_literal = columns.literal_tokens.append
        add_appended_count = columns.appended_block_counts.append
        add_sampled, add_sampled_row = self.sampled.append, self.sampled_rows.append
        # Preemption shortens the list from its end while we walk it, never up to where we are.
        for index, sequence in without(others, running):
            if budget <= 0:
                break
            if not sequence.steady:
                self.budget = budget
                most = max(1, budget - (len(running) - index - 1))
                if not sequence.caught_up:
                    self._schedule_chunk(sequence, index, most)
                elif not sequence.held:
                    self._schedule_last(sequence, index, most)
                budget = self.budget
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
        self.budget = budget

    def _schedule_waiting(self, now: float) -> None:
        """Starts sequences in order of rank while there are budget, rows and blocks.

        The first that cannot start holds up the rest, else the large would starve.
        """
        ledger = self.ledger
        waiting, most_added = ledger.waiting, ledger.config.max_added_token_count
        while self.budget > 0 and waiting and ledger.free_rows:
            sequence = waiting.first_begun if ledger.is_closing else waiting.first
            if sequence is None or sequence.pending:
                break
            if self.added and self.added_token_count + len(sequence.token_ids) > most_added:
                break  # the next plan brings it
            hits = ledger.cache.lookup(sequence)
            if not can_start(ledger, len(sequence.token_ids), hits):
                break
            self._start(sequence, hits, now)

    def _start(self, sequence: Sequence, hits: list[BlockId], now: float) -> None:
        """A waiting sequence enters a row behind all that run, and computes its first chunk."""
        ledger = self.ledger
        index = len(ledger.running)
        ledger.start(sequence, hits)
        if sequence.started_at is None:
            sequence.started_at = now
        ledger.admission.note_start(now)
        self.added_token_count += len(sequence.token_ids)
        self.added.append(
            sequence.added(hits)  # the blocks of the first chunk come as appended ones
        )
        self._schedule_chunk(sequence, index, self.budget)

    def _schedule_chunk(self, sequence: Sequence, index: int, most: int) -> None:
        """Up to `most` tokens of a sequence whose tokens the worker's row holds already.

        `index` is its place among the running ones; only those behind make room for it. When even
        that is not enough it takes what room there is, possibly none.
        """
        ledger, columns = self.ledger, self.columns
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
        if self.max_draft_count:
            columns.draft_counts.append(0)
            columns.open_step_distances.append(0)
        sequence.planned(self.step_id, end)
        self.budget -= end - start
        self.chunks.append((sequence.row, sequence, start))
        if end == known:
            self._reach_end(sequence, 0)
        counters = ledger.counters
        counters.recomputed_tokens += max(0, min(end, sequence.furthest) - start)
        fresh_start = max(start, sequence.furthest)
        counters.prompt_tokens += max(0, min(end, sequence.prompt_count) - fresh_start)

    def _schedule_last(self, sequence: Sequence, index: int, most: int) -> None:
        """The last token of a sequence that has caught up, and up to `most` - 1 drafts behind it.

        It starts at `computed`, or, as far as drafts in flight are accepted, further: blocks and
        limits are kept for the furthest. Drafts take blocks that are free, and of those leave one
        to every running sequence behind; nobody is preempted for them.
        """
        ledger, columns = self.ledger, self.columns
        block_size = ledger.config.block_size
        start, furthest = sequence.computed, sequence.computed + sequence.ahead
        room = sequence.token_limit - 1 - furthest
        if room <= 0:
            return  # its last token is in flight, or may be
        wanted = 1 if furthest == sequence.capacity else 0
        if not self._make_room(index, wanted):
            return
        draft_count = 0 if sequence.holds else min(self.max_draft_count, room - 1, most - 1)
        if draft_count:
            behind = len(ledger.running) - index - 1
            blocks = -(-(furthest + 1 + draft_count - sequence.capacity) // block_size)
            wanted = max(wanted, min(blocks, ledger.pool.free_count - behind))
            most_computed = sequence.capacity + wanted * block_size
            draft_count = min(draft_count, most_computed - furthest - 1)
        if wanted:
            # Full blocks below `start` were written by earlier plans than this one.
            ledger.cache.register(sequence)
        columns.rows.append(sequence.row)
        columns.start_positions.append(start)
        columns.token_counts.append(1 + draft_count)
        if sequence.pending:
            columns.source_step_distances.append(self.step_id - sequence.last_step)
            columns.literal_token_counts.append(0)
        else:
            columns.source_step_distances.append(0)
            columns.literal_token_counts.append(1)
            columns.literal_tokens.append(sequence.token_ids[start])
        columns.appended_block_counts.append(wanted)
        columns.appended_blocks.extend(ledger.grow(sequence, wanted))
        if self.max_draft_count:
            columns.draft_counts.append(draft_count)
            open_steps = ledger.open_step_count if sequence.ahead else 0
            columns.open_step_distances.append(open_steps)
        sequence.planned(self.step_id, start + 1)
        self.budget -= 1 + draft_count
        self._reach_end(sequence, draft_count)

    def _reach_end(self, sequence: Sequence, draft_count: int) -> None:
        """The plan computes the sequence's last token and so many drafts behind it."""
        sequence.reached_end(steady=not self.max_draft_count, draft_count=draft_count)
        if sequence.held:
            self.held_rows.append(sequence.row)
            self.held.append(sequence)
            if sequence.mask is not None:  # it is known already which tokens are allowed
                self.ledger.ready[sequence.sequence_id] = sequence
            return
        self.sampled.append(sequence)
        self.sampled_rows.append(sequence.row)
        if self.max_draft_count:
            self.draft_counts.append(draft_count)

    def _make_room(self, index: int, count: int) -> bool:
        """Preempts from the end, never the running sequence at `index`, until blocks are free.

        False: there are too few although nobody ranks behind. Then the sequence waits a step with
        what it has; those before it go on and, if need be, take it from there.
        """
        ledger = self.ledger
        while ledger.pool.free_count < count:
            if len(ledger.running) <= index + 1:
                return False
            ledger.preempt(ledger.running.last)
        return True
